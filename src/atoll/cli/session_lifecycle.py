"""`atoll session …`: start, stop, archive, pause, resume, update, extend, clone."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids, startable_session_ids
from atoll.cli.options import ApiKey, Json, SessionId, Url, connect, expand_options
from atoll.cli.session_options import ChangedSessionOptions, update_options

if TYPE_CHECKING:
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


def start(
    which: StartableSessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Start stopped, archived or paused sessions.

    Running something in a session starts it automatically, unless it was created with
    --no-auto-start.
    """
    _request_state("start", which, wait, url, api_key, json)


def stop(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Stop sessions and free their memory. Their files stay on the node."""
    _request_state("stop", which, wait, url, api_key, json)


def archive(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Stop sessions and move their files to the blob store. Any node can then start them."""
    _request_state("archive", which, wait, url, api_key, json)


def pause(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Freeze sessions with their memory. Fails while an execution is running."""
    _request_state("pause", which, wait, url, api_key, json)


def resume(
    which: StartableSessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Same as start."""
    _request_state("resume", which, wait, url, api_key, json)


def _request_state(
    verb: str,
    which: Iterable[str],
    wait: float | None,
    url: str | None,
    api_key: str | None,
    json: bool,
) -> None:
    infos: list[SessionInfo] = []
    with connect(url, api_key) as atoll:
        for session_id in which:
            info = getattr(atoll.sessions.get(session_id), verb)(wait=wait)
            infos.append(info)
            if not json:
                output.line(f"{info.id} {info.status}")
    if json:
        output.as_json(infos)


@expand_options
def update(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[ChangedSessionOptions],
) -> None:
    """
    Change the given options of a session and keep the others.

    New limits apply at once, environment variables to later executions.
    """
    changes = update_options(options)
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).update(**changes)
    output.as_json(info) if json else output.line(info.id)


def extend(
    session_id: SessionId,
    seconds: Annotated[int, typer.Argument(min=1, help="Lifetime, from now on.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Set a session's remaining lifetime, and print when it ends."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).extend(seconds)
    if json:
        output.as_json(info)
    elif info.expires_at is None:
        output.line(f"{seconds} seconds after its next start")
    else:
        output.line(output.moment(info.expires_at))


@expand_options
def clone(
    session_id: SessionId,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[ChangedSessionOptions],
) -> None:
    """
    Create a session with the settings and files of another one, and print its id.

    The given options replace those of the other session. Memory, processes and executions are not
    copied.
    """
    changes = update_options(options)
    with connect(url, api_key) as atoll:
        cloned = atoll.sessions.get(session_id).clone(**changes)
    output.as_json(cloned.info) if json else output.line(cloned.id)


def described(info: "SessionInfo") -> dict[str, Any]:
    """The session's fields, with its state first."""
    fields = output.plain(info)
    state = {name: fields.pop(name) for name in ("id", "status", "wanted", "observed")}
    state |= {name: fields.pop(name) for name in ("cause", "message")}
    return {**state, "next": next_change(info), **fields}


def next_change(info: "SessionInfo") -> str:
    """The next automatic change of the session and its time, as far as the client can tell."""
    if info.retry_at is not None:
        return f"retries at {output.moment(info.retry_at)}"
    due: list[tuple[datetime, str]] = []
    if info.expires_at is not None and info.ended_at is None:
        due.append((info.expires_at, "ends (timeout)"))
        if info.idle_timeout is not None:
            idle = (info.active_at or info.created_at) + timedelta(seconds=info.idle_timeout)
            due.append((idle, "stops (idle)"))
    elif info.rested_at is not None and info.ended_at is None:
        if info.archive_after is not None and info.status != "archived":
            due.append((info.rested_at + timedelta(seconds=info.archive_after), "is archived"))
        if info.delete_after is not None:
            due.append((info.rested_at + timedelta(seconds=info.delete_after), "ends (idle)"))
    at, what = min(due, default=(None, ""))
    return "" if at is None else f"{what} at {output.moment(at)}"
