"""
Copies files and directories between this machine and a session.

If the target is a directory or ends with `/`, the source keeps its name in it. A directory is one
stream, however many files it has. `-` is stdin or stdout, for a single file. Progress is shown on
stderr if it is a terminal.
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from atoll.cli import output
from atoll.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.file_transfer import ProgressCallback
    from atoll.sdk.sync import Atoll, Files
    from atoll.sdk.values import Tree

_REMOTE = re.compile(r"(sess_[^:/]+):(.*)", re.DOTALL)
_TOP = ("", ".", "/", "/workspace", "/workspace/")


def copy(atoll: "Atoll", source: str, target: str) -> "Tree":
    """Copy, and return a summary."""
    source_match, target_match = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if source_match and not target_match:
        return _download(atoll.sessions.get(source_match[1]).files, source_match[2], target)
    if target_match and not source_match:
        return _upload(atoll.sessions.get(target_match[1]).files, source, target_match[2])
    raise typer.BadParameter("expected SESSION:PATH and a local path or -, in either order.")


def _upload(files: "Files", source: str, target: str) -> "Tree":
    from atoll.sdk.values import Tree

    if source == "-":
        if target in _TOP or target.endswith("/"):
            raise typer.BadParameter("a copy from stdin needs a file name.")
        # Unbuffered, because an abandoned read would keep the lock of a buffer.
        with open(0, "rb", buffering=0, closefd=False) as stdin, _progress_bar(target) as progress:
            entry = files.upload(stdin, target, progress=progress)
        return Tree(entry.path, 1, entry.size)
    local = Path(source)
    local.stat()  # Fails before anything is created.
    name = local.resolve().name
    if target in _TOP or target.endswith("/") or _is_directory(files, target):
        top = "" if target in _TOP else target
        target = f"{top.rstrip('/')}/{name}" if top else name
    with _progress_bar(name) as progress:
        if local.is_dir():
            return files.upload_tree(local, target, progress=progress)
        mode = local.stat().st_mode & 0o777 if local.is_file() else None
        entry = files.upload(local, target, mode=mode, progress=progress)
    return Tree(entry.path, 1, entry.size)


def _download(files: "Files", source: str, target: str) -> "Tree":
    from atoll.sdk.files import local_target
    from atoll.sdk.values import Tree

    name = "" if source in _TOP else PurePosixPath(source).name
    if target == "-":
        # A progress bar would mix with the bytes on the same terminal.
        with _progress_bar(name, quiet=sys.stdout.isatty()) as progress:
            counter = _SizeCounter(progress)
            files.download(source, sys.stdout.buffer, progress=counter)
        return Tree("-", 1, counter.size)
    directory = not name or files.stat(source).type == "directory"
    local = local_target(target, name) if name else Path(target)
    with _progress_bar(name or "workspace") as progress:
        if directory:
            return files.download_tree(source, local, progress=progress)
        counter = _SizeCounter(progress)
        path = files.download(source, local, progress=counter)
    return Tree(str(path), 1, counter.size)


class _SizeCounter:
    """Remembers the size of a transfer."""

    def __init__(self, progress: "ProgressCallback | None") -> None:
        self._progress = progress
        self.size = 0

    def __call__(self, size: int, total: int | None) -> None:
        self.size = size
        if self._progress is not None:
            self._progress(size, total)


@contextmanager
def _progress_bar(name: str, quiet: bool = False) -> "Iterator[ProgressCallback | None]":
    """A progress bar, if stderr is a terminal."""
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


def _is_directory(files: "Files", path: str) -> bool:
    try:
        return files.stat(path).type == "directory"
    except NotFound as error:
        if error.code != "file_not_found":
            raise
        return False
