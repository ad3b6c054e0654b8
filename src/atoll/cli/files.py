"""
`atoll session …`: the commands for a session's files, which are named SESSION:PATH.

Lists are told as they come, one line each, so that their length costs no memory; with `--json` each
line is a JSON object.
"""

import sys
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids
from atoll.cli.options import ApiKey, Json, Url, connect

Place = Annotated[
    str, typer.Argument(metavar="SESSION[:PATH]", autocompletion=session_ids, show_default=False)
]
Glob = Annotated[
    str | None, typer.Option("--glob", "-g", help='What matches, like "**/*.py".', metavar="GLOB")
]


def place(text: str) -> tuple[str, str]:
    """The session and the path in it."""
    session_id, _, path = text.partition(":")
    return session_id, path


def cp(
    source: Annotated[str, typer.Argument(help="A local path, or SESSION:PATH; - is stdin.")],
    target: Annotated[str, typer.Argument(help="The other of the two; - is stdout.")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="For those used to it: it always is.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Copy a file or directory into a session or out of one.

    A directory is copied with all in it. A target that is a directory, or ends with /, takes the
    source under its own name.
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
    where: Place,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-R", help="All that is beneath it.")
    ] = False,
    glob: Glob = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List a directory of a session: mode, size, time and path."""
    session_id, path = place(where)
    with connect(url, api_key) as atoll:
        for entry in atoll.sessions.get(session_id).files.list(
            path, recursive=recursive, glob=glob
        ):
            if json:
                output.as_json(entry, indent=None)
                continue
            mark = {"directory": "/", "symlink": "@"}.get(entry.type, "")
            moment = entry.modified_at.isoformat(sep=" ", timespec="seconds")
            output.line(f"{entry.mode} {entry.size:>12} {moment} {entry.path}{mark}")


def cat(
    where: Annotated[list[str], typer.Argument(metavar="SESSION:PATH...", show_default=False)],
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Write files of a session to stdout, as they are."""
    with connect(url, api_key) as atoll:
        for one in where:
            session_id, path = place(one)
            atoll.sessions.get(session_id).files.download(path, sys.stdout.buffer)


def search(
    where: Place,
    query: Annotated[str, typer.Argument(help="A text.")],
    regex: Annotated[bool, typer.Option("--regex", "-E", help="A regular expression.")] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i")] = False,
    glob: Glob = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show lines of a session's files that hold a text. Ends with 1 if there are none."""
    session_id, path = place(where)
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
    where: Place,
    recursive: Annotated[
        bool, typer.Option("--recursive/--flat", help="With all beneath it, or only in it.")
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Tell what happens to a session's files, until the directory is gone or Ctrl-C."""
    session_id, path = place(where)
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
    session_id: Annotated[str, typer.Argument(metavar="SESSION", autocompletion=session_ids)],
    last: Annotated[
        bool, typer.Option("--last", help="Only show when it was done last; 1 if never.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Save a session's files to the blob store."""
    with connect(url, api_key) as atoll:
        session = atoll.sessions.get(session_id)
        saved = session.last_checkpoint() if last else session.checkpoint()
    if saved is None:
        output.note(f"No files of session {session_id} are in the blob store.")
        raise typer.Exit(1)
    output.as_json(saved) if json else output.details(saved)
