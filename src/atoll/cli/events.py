"""`atoll events`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import ApiKey, JsonLines, Url, connect

if TYPE_CHECKING:
    from atoll.sdk.values import FeedEvent

Types = Annotated[
    str | None, typer.Option("--types", help='Only these types, like "session.*,execution.failed".')
]


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print events from now on, until interrupted.")
    ] = False,
    types: Types = None,
    subject: Annotated[str | None, typer.Option(help="Only events of this id.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="Only events after this number.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: JsonLines = False,
) -> None:
    """Print changes of sessions, executions, nodes and templates, oldest first."""
    chosen = split(types)
    with connect(url, api_key) as atoll:
        if follow:
            found = atoll.events.follow(
                types=chosen, subject=subject, after="end" if after is None else after
            )
        else:
            found = atoll.events.list(types=chosen, subject=subject, after=after)
        for event in found:
            _show(event, json=json)


def split(types: str | None) -> list[str]:
    return [] if types is None else types.split(",")


def _show(event: "FeedEvent", *, json: bool) -> None:
    if json:
        output.as_json(event, indent=None)
        return
    fields = " ".join(f"{name}={value}" for name, value in event.data.items() if value is not None)
    at = event.at.isoformat(sep=" ", timespec="milliseconds")
    output.line(f"{event.number}  {at}  {event.type}  {event.subject}  {fields}")
