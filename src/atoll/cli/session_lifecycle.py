"""`atoll session …`: start, stop, archive, pause, resume."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids, startable_session_ids
from atoll.cli.options import Json
from atoll.cli.remote import connected

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import SessionInfo

SessionIds = Annotated[
    list[str],
    typer.Argument(metavar="SESSION...", help="Session ids.", autocompletion=session_ids),
]
StartableSessionIds = Annotated[
    list[str],
    typer.Argument(metavar="SESSION...", help="Session ids.", autocompletion=startable_session_ids),
]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        min=0,
        help="Maximum seconds to wait. The server continues in any case. Default: no limit.",
    ),
]


@connected
def start(
    atoll: "Atoll", which: StartableSessionIds, wait: Wait = None, json: Json = False
) -> None:
    """
    Start stopped, archived or paused sessions.

    Running something in a session starts it automatically, unless it was created with
    --no-auto-start.
    """
    _request_state(atoll, "start", which, wait, json=json)


@connected
def stop(atoll: "Atoll", which: SessionIds, wait: Wait = None, json: Json = False) -> None:
    """Stop sessions and free their memory. Their files stay on the node."""
    _request_state(atoll, "stop", which, wait, json=json)


@connected
def archive(atoll: "Atoll", which: SessionIds, wait: Wait = None, json: Json = False) -> None:
    """Stop sessions and move their files to the blob store. Any node can then start them."""
    _request_state(atoll, "archive", which, wait, json=json)


@connected
def pause(atoll: "Atoll", which: SessionIds, wait: Wait = None, json: Json = False) -> None:
    """Freeze sessions with their memory. Fails while an execution is running."""
    _request_state(atoll, "pause", which, wait, json=json)


@connected
def resume(
    atoll: "Atoll", which: StartableSessionIds, wait: Wait = None, json: Json = False
) -> None:
    """Same as start."""
    _request_state(atoll, "resume", which, wait, json=json)


def _request_state(
    atoll: "Atoll", verb: str, which: Iterable[str], wait: float | None, *, json: bool
) -> None:
    infos: list[SessionInfo] = []
    for session_id in which:
        info = getattr(atoll.sessions.get(session_id), verb)(wait=wait)
        infos.append(info)
        if not json:
            output.line(f"{info.id} {info.status}")
    if json:
        output.as_json(infos)
