"""
`atoll session …`: commands for the files of a session, written SESSION:PATH.

Lists are printed as they arrive, in constant memory; with `--json` each line is a JSON object.
"""

import sys
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids
from atoll.cli.options import ApiKey, Json, Url, connect

SessionPath = Annotated[
    str,
    typer.Argument(
        metavar="SESSION[:PATH]",
        help="Session id, and a path in its workspace.",
        autocompletion=session_ids,
        show_default=False,
    ),
]
Glob = Annotated[
    str | None,
    typer.Option("--glob", "-g", help='Only paths that match, like "**/*.py".', metavar="GLOB"),
]


def split_path(text: str) -> tuple[str, str]:
    """Session id and path."""
    session_id, _, path = text.partition(":")
    return session_id, path


def cp(
    source: Annotated[str, typer.Argument(help="Local path or SESSION:PATH; - is stdin.")],
    target: Annotated[str, typer.Argument(help="Local path or SESSION:PATH; - is stdout.")],
    recursive: Annotated[
        bool,
        typer.Option(
            "--recursive", "-r", help="Accepted for familiarity; copies are always recursive."
        ),
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Copy a file or directory into a session or out of it.

    If the target is a directory or ends with /, the source keeps its name in it.
    """
    from atoll.cli.copy import copy

    with connect(url, api_key) as atoll:
        copied = copy(atoll, source, target)
    for one in copied.left_out:
        output.note(f"left out {one}.")
    if json and target != "-":
        output.as_json(copied)
    else:
        size = output.size(copied.size)
        output.note(f"{copied.files} file(s) copied, {size}.")


def ls(
    where: SessionPath,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-R", help="Include subdirectories.")
    ] = False,
    glob: Glob = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List a directory of a session: mode, size, time and path."""
    session_id, path = split_path(where)
    with connect(url, api_key) as atoll:
        for entry in atoll.sessions.get(session_id).files.list(
            path, recursive=recursive, glob=glob
        ):
            if json:
                output.as_json(entry, indent=None)
                continue
            mark = {"directory": "/", "symlink": "@"}.get(entry.type, "")
            moment = output.moment(entry.modified_at)
            output.line(f"{entry.mode} {entry.size:>12} {moment} {entry.path}{mark}")


def cat(
    where: Annotated[list[str], typer.Argument(metavar="SESSION:PATH...", show_default=False)],
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Write files of a session to stdout."""
    with connect(url, api_key) as atoll:
        for one in where:
            session_id, path = split_path(one)
            atoll.sessions.get(session_id).files.download(path, sys.stdout.buffer)


def search(
    where: SessionPath,
    query: Annotated[str, typer.Argument(help="Text to search for.")],
    regex: Annotated[
        bool, typer.Option("--regex", "-E", help="The text is a regular expression.")
    ] = False,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Ignore upper and lower case.")
    ] = False,
    glob: Glob = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Search the files of a session for a text. Exits with 1 if nothing matches."""
    session_id, path = split_path(where)
    found = False
    with connect(url, api_key) as atoll:
        for match in atoll.sessions.get(session_id).files.search(
            query, path, regex=regex, ignore_case=ignore_case, glob=glob
        ):
            found = True
            if json:
                output.as_json(match, indent=None)
            else:
                output.line(f"{match.path}:{match.line}:{match.column}: {match.text}")
    raise typer.Exit(0 if found else 1)


def watch(
    where: SessionPath,
    recursive: Annotated[
        bool, typer.Option("--recursive/--flat", help="Include subdirectories, or not.")
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Print changes of a session's files until the directory is removed or Ctrl-C is pressed."""
    session_id, path = split_path(where)
    with connect(url, api_key) as atoll:
        for event in atoll.sessions.get(session_id).files.watch(path, recursive=recursive):
            if json:
                output.as_json(event, indent=None)
            elif event.moved_from is not None:
                output.line(f"{event.kind} {event.moved_from} -> {event.path}")
            else:
                output.line(f"{event.kind} {event.path}".rstrip())
            sys.stdout.flush()


def checkpoint(
    session_id: Annotated[
        str, typer.Argument(metavar="SESSION", help="Session id.", autocompletion=session_ids)
    ],
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="Only show the latest checkpoint; exit with 1 if there is none."
        ),
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Take a checkpoint: store a copy of a session's files in the blob store."""
    with connect(url, api_key) as atoll:
        session = atoll.sessions.get(session_id)
        saved = session.last_checkpoint() if last else session.checkpoint()
    if saved is None:
        output.note(f"Session {session_id} has no checkpoint.")
        raise typer.Exit(1)
    output.as_json(saved) if json else output.details(saved)
