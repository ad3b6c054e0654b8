"""
Shows the output of a build, and on a terminal a status line below it.

The output comes from packages, so control characters are escaped.
"""

import sys
from typing import TYPE_CHECKING

import typer

from atoll.cli import output

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.values import BuildEvent


def follow(events: "Iterable[BuildEvent]", what: str, *, quiet: bool) -> None:
    """Show the events on stderr until the build has ended."""
    if quiet:
        for _ in events:
            pass
        return
    if not sys.stderr.isatty():
        for event in events:
            if event.text is not None:
                typer.echo(output.visible(event.text), nl=False, err=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status(Text(f"{what}: waiting")) as line:
        for event in events:
            if event.text is not None:
                console.print(Text(output.visible(event.text)), end="")
            if event.status is not None:
                attempt = f", attempt {event.attempts}" if event.attempts > 1 else ""
                line.update(Text(output.visible(f"{what}: {event.status}{attempt}")))
