"""
Copying between this machine and a session, whole directories too.

A target that is a directory, or ends with `/`, takes the source under its own name. Links and
special files are left out, and said to be: what a link points to differs inside and outside. Names
that come from a session never lead out of the local target.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from atoll.cli import output
from atoll.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll, Files

_REMOTE = re.compile(r"(sess_[^:/]+):(.*)", re.DOTALL)


def copy(atoll: "Atoll", source: str, target: str) -> list[str]:
    """The files that were copied, by the paths they have now."""
    outward, inward = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if outward and not inward:
        files = atoll.sessions.get(outward[1]).files
        return list(_out(files, outward[2], Path(target), target.endswith("/")))
    if inward and not outward:
        files = atoll.sessions.get(inward[1]).files
        return list(_in(files, Path(source), inward[2]))
    raise typer.BadParameter("one of the two is SESSION:PATH, the other a local path.")


def _in(files: "Files", source: Path, target: str) -> "Iterator[str]":
    source.stat()  # says what is wrong with it before anything is made
    name = source.resolve().name
    if target in ("", ".", "/workspace") or target.endswith("/") or _is_directory(files, target):
        target = str(PurePosixPath(target or ".") / name)
    if not source.is_dir():
        yield files.upload(source, target).path
        return
    for directory, children, names in os.walk(source):
        inside = PurePosixPath(target) / Path(directory).relative_to(source).as_posix()
        files.mkdir(str(inside))
        for child in children:
            if (Path(directory) / child).is_symlink():
                output.note(f"{Path(directory) / child} is a link and was left out.")
        for name in names:
            local = Path(directory) / name
            if local.is_symlink() or not local.is_file():
                output.note(f"{local} is not a regular file and was left out.")
            else:
                yield files.upload(local, str(inside / name)).path


def _out(files: "Files", source: str, target: Path, into: bool) -> "Iterator[str]":
    name = PurePosixPath(source).name
    if name and (into or target.is_dir()):
        target.mkdir(parents=True, exist_ok=True)
        target /= _safe(name)
    if not name or files.stat(source).type == "directory":
        yield from _tree(files, source, target)
    else:
        yield str(files.download(source, target))


def _tree(files: "Files", source: str, target: Path) -> "Iterator[str]":
    target.mkdir(parents=True, exist_ok=True)
    for entry in files.list(source):
        local = target / _safe(entry.name)
        remote = str(PurePosixPath(source) / entry.name)
        if entry.type == "directory":
            if local.is_symlink():
                raise InvalidRequest(f"{local} is a link; remove it first.", code="local_link")
            yield from _tree(files, remote, local)
        elif entry.type == "file":
            yield str(files.download(remote, local))
        else:
            output.note(f"{remote} is a {entry.type} and was left out.")


def _safe(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidRequest(f"{name!r} is not the name of a file.", code="unsafe_name")
    return name


def _is_directory(files: "Files", path: str) -> bool:
    try:
        return files.stat(path).type == "directory"
    except NotFound:
        return False
