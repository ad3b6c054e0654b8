"""
`atoll session …`: commands for the files of a session, written SESSION:PATH.

Lists are printed as they arrive, in constant memory; with `--json` each line is a JSON object.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.completion import session_ids
from atoll.cli.options import Json
from atoll.cli.remote import connected, streamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll, Files
    from atoll.sdk.values import Entry, FileEvent, Match

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


def _located(atoll: "Atoll", where: str) -> "tuple[Files, str]":
    session_id, path = split_path(where)
    return atoll.sessions.get(session_id).files, path


@connected
def cp(
    atoll: "Atoll",
    source: Annotated[str, typer.Argument(help="Local path or SESSION:PATH; - is stdin.")],
    target: Annotated[str, typer.Argument(help="Local path or SESSION:PATH; - is stdout.")],
    recursive: Annotated[
        bool,
        typer.Option(
            "--recursive", "-r", help="Accepted for familiarity; copies are always recursive."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """
    Copy a file or directory into a session or out of it.

    If the target is a directory or ends with /, the source keeps its name in it.
    """
    from atoll.cli.copy import copy

    copied = copy(atoll, source, target)
    for one in copied.left_out:
        output.note(f"left out {one}.")
    if json and target != "-":
        output.as_json(copied)
    else:
        size = output.size(copied.size)
        output.note(f"{copied.files} file(s) copied, {size}.")


def _print_entry(entry: "Entry") -> None:
    mark = {"directory": "/", "symlink": "@"}.get(entry.type, "")
    moment = output.moment(entry.modified_at)
    output.line(f"{entry.mode} {entry.size:>12} {moment} {entry.path}{mark}")


@streamed(_print_entry)
def ls(
    atoll: "Atoll",
    where: SessionPath,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-R", help="Include subdirectories.")
    ] = False,
    glob: Glob = None,
) -> "Iterator[Entry]":
    """List a directory of a session: mode, size, time and path."""
    files, path = _located(atoll, where)
    return files.list(path, recursive=recursive, glob=glob)


@connected
def cat(
    atoll: "Atoll",
    where: Annotated[list[str], typer.Argument(metavar="SESSION:PATH...", show_default=False)],
) -> None:
    """Write files of a session to stdout."""
    for one in where:
        files, path = _located(atoll, one)
        files.download(path, sys.stdout.buffer)


def _print_match(match: "Match") -> None:
    output.line(f"{match.path}:{match.line}:{match.column}: {match.text}")


@streamed(_print_match)
def search(
    atoll: "Atoll",
    where: SessionPath,
    query: Annotated[str, typer.Argument(help="Text to search for.")],
    regex: Annotated[
        bool, typer.Option("--regex", "-E", help="The text is a regular expression.")
    ] = False,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Ignore upper and lower case.")
    ] = False,
    glob: Glob = None,
) -> "Iterator[Match]":
    """Search the files of a session for a text. Exits with 1 if nothing matches."""
    files, path = _located(atoll, where)
    found = False
    for match in files.search(query, path, regex=regex, ignore_case=ignore_case, glob=glob):
        found = True
        yield match
    if not found:
        raise typer.Exit(exit_codes.FAILED)


def _print_change(event: "FileEvent") -> None:
    if event.moved_from is not None:
        output.line(f"{event.kind} {event.moved_from} -> {event.path}")
    else:
        output.line(f"{event.kind} {event.path}".rstrip())


@streamed(_print_change)
def watch(
    atoll: "Atoll",
    where: SessionPath,
    recursive: Annotated[
        bool, typer.Option("--recursive/--flat", help="Include subdirectories, or not.")
    ] = True,
) -> "Iterator[FileEvent]":
    """Print changes of a session's files until the directory is removed or Ctrl-C is pressed."""
    files, path = _located(atoll, where)
    return files.watch(path, recursive=recursive)
