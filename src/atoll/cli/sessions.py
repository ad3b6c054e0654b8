"""
`atoll session …`: the tree of its commands, and those for sessions as records.

Others are in `session_lifecycle`, `session_programs`, `files` and `shell`.
"""

from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import exit_codes, files, output, session_lifecycle, session_programs
from atoll.cli.completion import session_ids, template_ids
from atoll.cli.options import Json, Limit, SessionId, Status, Template, command_group
from atoll.cli.remote import connected, remote
from atoll.cli.session_options import (
    ChangedSessionOptions,
    NewSessionOptions,
    create_options,
    update_options,
)
from atoll.cli.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import Checkpoint, SessionInfo

app = command_group("Sandboxes of a server.")


@remote(line="id")
def create(
    atoll: "Atoll", template: Template = None, *, options: NewSessionOptions
) -> "SessionInfo":
    """Create a session and print its id."""
    return atoll.sessions.create(template, **create_options(options)).info


@remote(
    table={
        "SESSION": "id",
        "STATUS": "status",
        "TEMPLATE": "template_id",
        "NODE": "runtime_node",
        "CPU": "resources.cpu",
        "MEMORY": "resources.memory",
        "AGE": "created_at",
        "CAUSE": "cause",
    }
)
def list_(
    atoll: "Atoll",
    status: Status = None,
    template: Annotated[
        str | None, typer.Option(autocompletion=template_ids, help="Only those of this template.")
    ] = None,
    limit: Limit = 100,
) -> "Iterable[SessionInfo]":
    """List sessions, including ended ones, newest first."""
    found = atoll.sessions.list(status=status, template=template)
    return (session.info for session in islice(found, limit))


def _described(info: "SessionInfo") -> dict[str, Any]:
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


def _print(info: "SessionInfo") -> None:
    output.details(_described(info))


@remote(show=_print)
def show(atoll: "Atoll", session_id: SessionId) -> "SessionInfo":
    """Show a session: its requested and current state, and its next automatic change."""
    return atoll.sessions.get(session_id).info


@remote(line="id")
def update(atoll: "Atoll", session_id: SessionId, options: ChangedSessionOptions) -> "SessionInfo":
    """
    Change the given options of a session and keep the others.

    New limits apply at once, environment variables to later executions.
    """
    changes = update_options(options)
    return atoll.sessions.get(session_id).update(**changes)


@connected
def extend(
    atoll: "Atoll",
    session_id: SessionId,
    seconds: Annotated[int, typer.Argument(min=1, help="Lifetime, from now on.")],
    json: Json = False,
) -> None:
    """Set a session's remaining lifetime, and print when it ends."""
    info = atoll.sessions.get(session_id).extend(seconds)
    if json:
        output.as_json(info)
    elif info.expires_at is None:
        output.line(f"{seconds} seconds after its next start")
    else:
        output.line(output.moment(info.expires_at))


@remote(line="id")
def clone(atoll: "Atoll", session_id: SessionId, options: ChangedSessionOptions) -> "SessionInfo":
    """
    Create a session with the settings and files of another one, and print its id.

    The given options replace those of the other session. Memory, processes and executions are not
    copied.
    """
    changes = update_options(options)
    return atoll.sessions.get(session_id).clone(**changes).info


@remote()
def checkpoint(
    atoll: "Atoll",
    session_id: SessionId,
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="Only show the latest checkpoint; exit with 1 if there is none."
        ),
    ] = False,
) -> "Checkpoint":
    """Take a checkpoint: store a copy of a session's files in the blob store."""
    session = atoll.sessions.get(session_id)
    stored = session.last_checkpoint() if last else session.checkpoint()
    if stored is None:
        output.note(f"Session {session_id} has no checkpoint.")
        raise typer.Exit(exit_codes.FAILED)
    return stored


def _print_ids(infos: "Iterable[SessionInfo]") -> None:
    for info in infos:
        output.line(info.id)


@remote(show=_print_ids)
def rm(
    atoll: "Atoll",
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="SESSION[:PATH]...",
            help="Session to end, or file to remove.",
            autocompletion=session_ids,
        ),
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Also remove directories with their contents.")
    ] = False,
) -> "list[SessionInfo]":
    """
    End sessions, or remove files from them. Records and results of ended sessions stay readable.
    """
    targets = [(*files.split_path(one), ":" in one) for one in which]
    if any(named and not path for _, path, named in targets):
        raise typer.BadParameter("expected a path after the colon.", param_hint="SESSION:PATH")
    infos: list[SessionInfo] = []
    for session_id, path, named in targets:
        if named:
            atoll.sessions.get(session_id).files.remove(path, recursive=recursive)
        else:
            infos.append(atoll.sessions.delete(session_id))
    return infos


# In the order of the help text.
for command in (
    create,
    list_,
    show,
    session_programs.ps,
    session_programs.install,
    session_programs.exec_,
    rm,
    session_lifecycle.start,
    session_lifecycle.stop,
    session_lifecycle.archive,
    session_lifecycle.pause,
    session_lifecycle.resume,
    update,
    extend,
    clone,
    files.cp,
    files.ls,
    files.cat,
    files.search,
    files.watch,
    checkpoint,
    shell,
):
    app.command(command.__name__.rstrip("_"))(command)
