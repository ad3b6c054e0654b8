"""
`atoll session …`: the commands by which a session becomes another than it is: started, stopped,
archived, paused, changed, copied.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import output
from atoll.cli.completion import resting_ids, session_ids
from atoll.cli.options import (
    ApiKey,
    Cpu,
    Disk,
    Env,
    Json,
    MaxProcesses,
    Memory,
    Url,
    connect,
    environment,
)

if TYPE_CHECKING:
    from atoll.sdk.values import SessionInfo

SessionId = Annotated[
    str, typer.Argument(metavar="SESSION", help="Its id.", autocompletion=session_ids)
]
SessionIds = Annotated[
    list[str], typer.Argument(metavar="SESSION...", help="Their ids.", autocompletion=session_ids)
]
RestingIds = Annotated[
    list[str], typer.Argument(metavar="SESSION...", help="Their ids.", autocompletion=resting_ids)
]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        min=0,
        help="Seconds to wait for it at most; else as long as it takes. It goes on in any case.",
    ),
]
Label = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="Of your own. May be repeated."),
]
IdleTimeout = Annotated[
    int | None,
    typer.Option(
        "--idle-timeout", min=0, help="Seconds without requests until it is stopped; 0 is never."
    ),
]
ArchiveAfter = Annotated[
    int | None,
    typer.Option(
        "--archive-after", min=0, help="Seconds at rest until it is archived; 0 is never."
    ),
]
DeleteAfter = Annotated[
    int | None,
    typer.Option("--delete-after", min=0, help="Seconds at rest until it ends; 0 is never."),
]
AutoStart = Annotated[
    bool | None,
    typer.Option(
        "--auto-start/--no-auto-start",
        help="Whether a request that needs it starts it when it is paused or at rest.",
    ),
]
Life = Annotated[int | None, typer.Option(help="Seconds of life from now on.")]
NoEnv = Annotated[
    list[str] | None,
    typer.Option("--no-env", metavar="NAME", help="Remove this variable. May be repeated."),
]
NoLabel = Annotated[
    list[str] | None,
    typer.Option("--no-label", metavar="NAME", help="Remove this label. May be repeated."),
]


def start(
    which: RestingIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Have sessions run that are stopped, archived or paused. What is run in one starts it by itself,
    unless it was made with --no-auto-start.
    """
    _become("start", which, wait, url, api_key, json)


def stop(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """End what runs in sessions and give back their memory; their files stay on the node."""
    _become("stop", which, wait, url, api_key, json)


def archive(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Stop sessions and move their files to the blob store, from where any node starts them."""
    _become("archive", which, wait, url, api_key, json)


def pause(
    which: SessionIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Let sessions stand still with their memory; not while something runs in them."""
    _become("pause", which, wait, url, api_key, json)


def resume(
    which: RestingIds,
    wait: Wait = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """The same as start."""
    _become("resume", which, wait, url, api_key, json)


def _become(
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


def update(
    session_id: SessionId,
    timeout: Life = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    env: Env = None,
    no_env: NoEnv = None,
    label: Label = None,
    no_label: NoLabel = None,
    auto_start: AutoStart = None,
    idle_timeout: IdleTimeout = None,
    archive_after: ArchiveAfter = None,
    delete_after: DeleteAfter = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Change a session; what is not given stays.

    Limits count at once, variables for what is run next.
    """
    variables, marks = _changed(environment(env), no_env), _changed(labels(label), no_label)
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).update(
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=variables,
            labels=marks,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
    output.as_json(info) if json else output.line(info.id)


def extend(
    session_id: SessionId,
    seconds: Annotated[int, typer.Argument(min=1, help="Of life, from now on.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Give a session so many seconds from now on, and print when its life is over."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).extend(seconds)
    if json:
        output.as_json(info)
    elif info.expires_at is None:
        output.line(f"{seconds} seconds from its next start on")
    else:
        output.line(moment(info.expires_at))


def clone(
    session_id: SessionId,
    timeout: Life = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    env: Env = None,
    no_env: NoEnv = None,
    label: Label = None,
    no_label: NoLabel = None,
    auto_start: AutoStart = None,
    idle_timeout: IdleTimeout = None,
    archive_after: ArchiveAfter = None,
    delete_after: DeleteAfter = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Make a session as another is, but for what is given, with a copy of its files; print its id.

    Memory, processes and executions are not copied.
    """
    variables, marks = _changed(environment(env), no_env), _changed(labels(label), no_label)
    with connect(url, api_key) as atoll:
        cloned = atoll.sessions.get(session_id).clone(
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=variables,
            labels=marks,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
    output.as_json(cloned.info) if json else output.line(cloned.id)


def labels(pairs: Iterable[str] | None) -> dict[str, str]:
    """From `NAME=VALUE`."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE.", param_hint="--label")
        found[name] = value
    return found


def _changed(given: dict[str, str], removed: Iterable[str] | None) -> dict[str, str | None]:
    return {**given, **dict.fromkeys(removed or ())}


def shown(info: "SessionInfo") -> dict[str, Any]:
    """The session's fields, those first that say how it is."""
    fields = output.plain(info)
    first = {name: fields.pop(name) for name in ("id", "status", "wanted", "observed")}
    return {
        **first,
        "cause": fields.pop("cause"),
        "message": fields.pop("message"),
        "next": next_change(info),
        **fields,
    }


def next_change(info: "SessionInfo") -> str:
    """What becomes of the session by itself, and when; as far as this can be told from here."""
    if info.retry_at is not None:
        return f"tried again at {moment(info.retry_at)}"
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
    return "" if at is None else f"{what} at {moment(at)}"


def moment(at: datetime) -> str:
    return at.isoformat(sep=" ", timespec="seconds")
