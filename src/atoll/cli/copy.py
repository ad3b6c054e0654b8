"""
Copying between this machine and a session, whole directories too.

A target that is a directory, or ends with `/`, takes the source under its own name. A directory
goes as one stream, however many files it has. `-` is stdin or stdout, for one file. How far it is
shows on stderr, if that is a terminal.
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from atoll.cli import output
from atoll.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.file_transfer import ProgressCallback
    from atoll.sdk.sync import Atoll, Files
    from atoll.sdk.values import Tree

_REMOTE = re.compile(r"(sess_[^:/]+):(.*)", re.DOTALL)
_TOP = ("", ".", "/", "/workspace", "/workspace/")


def copy(atoll: "Atoll", source: str, target: str) -> "Tree":
    """What was copied, and where to."""
    outward, inward = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if outward and not inward:
        return _out(atoll.sessions.get(outward[1]).files, outward[2], target)
    if inward and not outward:
        return _in(atoll.sessions.get(inward[1]).files, source, inward[2])
    raise typer.BadParameter("one of the two is SESSION:PATH, the other a local path or -.")


def _in(files: "Files", source: str, target: str) -> "Tree":
    from atoll.sdk.values import Tree

    if source == "-":
        if target in _TOP or target.endswith("/"):
            raise typer.BadParameter("what comes from stdin needs a name.")
        # Without a buffer, whose lock a read that is given up would keep.
        with open(0, "rb", buffering=0, closefd=False) as stdin, _shown(target) as progress:
            entry = files.upload(stdin, target, progress=progress)
        return Tree(entry.path, 1, entry.size)
    local = Path(source)
    local.stat()  # says what is wrong with it before anything is made
    name = local.resolve().name
    if target in _TOP or target.endswith("/") or _is_directory(files, target):
        top = "" if target in _TOP else target
        target = f"{top.rstrip('/')}/{name}" if top else name
    with _shown(name) as progress:
        if local.is_dir():
            return files.upload_tree(local, target, progress=progress)
        mode = local.stat().st_mode & 0o777 if local.is_file() else None
        entry = files.upload(local, target, mode=mode, progress=progress)
    return Tree(entry.path, 1, entry.size)


def _out(files: "Files", source: str, target: str) -> "Tree":
    from atoll.sdk.values import Tree

    name = "" if source in _TOP else PurePosixPath(source).name
    if target == "-":
        # Its bar would be among the bytes if both were on one terminal.
        with _shown(name, quiet=sys.stdout.isatty()) as progress:
            counted = _Counted(progress)
            files.download(source, sys.stdout.buffer, progress=counted)
        return Tree("-", 1, counted.size)
    local = Path(target)
    directory = not name or files.stat(source).type == "directory"
    if name and (target.endswith("/") or local.is_dir()):
        local.mkdir(parents=True, exist_ok=True)
        local /= _safe(name)
    with _shown(name or "workspace") as progress:
        if directory:
            return files.download_tree(source, local, progress=progress)
        counted = _Counted(progress)
        path = files.download(source, local, progress=counted)
    return Tree(str(path), 1, counted.size)


class _Counted:
    """How much it was in the end."""

    def __init__(self, progress: "ProgressCallback | None") -> None:
        self._progress = progress
        self.size = 0

    def __call__(self, size: int, total: int | None) -> None:
        self.size = size
        if self._progress is not None:
            self._progress(size, total)


@contextmanager
def _shown(name: str, quiet: bool = False) -> "Iterator[ProgressCallback | None]":
    """Tells a terminal how far it is; nothing else is told anything."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(output.visible(name)[:40], total=None)

        def show(size: int, total: int | None) -> None:
            bar.update(task, completed=size, total=total)

        yield show


def _safe(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidRequest(f"{name!r} is not the name of a file.", code="unsafe_name")
    return name


def _is_directory(files: "Files", path: str) -> bool:
    try:
        return files.stat(path).type == "directory"
    except NotFound as error:
        if error.code != "file_not_found":
            raise
        return False
