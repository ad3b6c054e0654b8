"""`atoll events`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import JsonLines
from atoll.cli.remote import streamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import FeedEvent

Types = Annotated[
    str | None, typer.Option("--types", help='Only these types, like "session.*,execution.failed".')
]


def split(types: str | None) -> list[str]:
    return [] if types is None else types.split(",")


def _print(event: "FeedEvent") -> None:
    fields = " ".join(f"{name}={value}" for name, value in event.data.items() if value is not None)
    at = event.at.isoformat(sep=" ", timespec="milliseconds")
    output.line(f"{event.number}  {at}  {event.type}  {event.subject}  {fields}")


@streamed(_print, json=JsonLines)
def events(
    atoll: "Atoll",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print events from now on, until interrupted.")
    ] = False,
    types: Types = None,
    subject: Annotated[str | None, typer.Option(help="Only events of this id.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="Only events after this number.")] = None,
) -> "Iterator[FeedEvent]":
    """Print changes of sessions, executions, nodes and templates, oldest first."""
    chosen = split(types)
    if follow:
        return atoll.events.follow(
            types=chosen, subject=subject, after="end" if after is None else after
        )
    return atoll.events.list(types=chosen, subject=subject, after=after)
