"""
A build as a person watches it: what it prints, and below it a line of how it goes.

Where stderr is no terminal there is no such line. What is printed comes from packages, so nothing
of it steers the terminal.
"""

import sys
from typing import TYPE_CHECKING

import typer

from atoll.cli import output

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.values import BuildEvent


def follow(events: "Iterable[BuildEvent]", what: str, *, quiet: bool) -> None:
    """Until the build has ended; all of it goes to stderr."""
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
                again = f", attempt {event.attempts}" if event.attempts > 1 else ""
                line.update(Text(output.visible(f"{what}: {event.status}{again}")))
