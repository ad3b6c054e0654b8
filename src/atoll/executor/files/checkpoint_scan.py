"""
Reads the workspace for a checkpoint: its entries in order of path, and the contents of files.

User code may change everything meanwhile. That can spoil the copy of its own files and nothing
else: no link is followed out of the workspace, and a file that changes while it is read is reported
as changed.
"""

from __future__ import annotations

import errno
import os
import stat

from ...protocol import frames, minijson
from ..connection import Stream
from . import permissions, removal
from .artifacts import coarse_now
from .paths import STAGING, UPLOAD, FileError
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

BATCH = 32 * 1024
"""Bytes of entries that are sent together."""
MAX_DEPTH = 200
"""Each level holds a descriptor during the scan."""
MAX_NAMES = 250_000
"""Of one directory; they are sorted in memory."""
MAX_PATH = 16 * 1024
"""Characters; each takes up to six bytes in JSON."""
FILE, DIRECTORY, LINK = "f", "d", "l"


class Scan:
    """Iterates over all entries of the workspace; `cut` if some were left out."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.cut = False

    def entries(self) -> Iterator[list[Any] | None]:
        """Yields one entry at a time; None for a step without an entry."""
        stack: list[tuple[int, int, str, list[str]]] = []
        try:
            top = os.dup(self._workspace.root)
            stack.append((top, -1, "", self._names(top, top=True)))
            while stack:
                fd, mode, prefix, names = stack[-1]
                if not names:
                    stack.pop()
                    permissions.close(fd, mode)
                    yield None
                    continue
                name = names.pop()
                path = prefix + name
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    entry = _entry(path, status)
                    if stat.S_ISLNK(status.st_mode):
                        entry.append(os.readlink(name, dir_fd=fd))
                except OSError:
                    yield None  # Removed since it was listed.
                    continue
                if entry[1] == "":
                    yield None  # A pipe or a socket, which has no content to store.
                    continue
                if len(path) > MAX_PATH:
                    # User code can make paths of any length, by changing into each directory.
                    self.cut = True
                    yield None
                    continue
                yield entry
                if entry[1] == DIRECTORY:
                    below, mode = self._below(fd, name, len(stack))
                    if below >= 0:
                        stack.append((below, mode, path + "/", self._names(below)))
        finally:
            for fd, mode, _, _ in reversed(stack):
                permissions.close(fd, mode)

    def _below(self, fd: int, name: str, depth: int) -> tuple[int, int]:
        """A directory's descriptor, and its mode to restore; -1 if it cannot be entered."""
        if depth >= MAX_DEPTH:
            self.cut = True
            return -1, -1
        try:
            return permissions.open_directory(name, fd)
        except OSError:
            self.cut = True
            return -1, -1

    def _names(self, fd: int, top: bool = False) -> list[str]:
        """Names in reverse order."""
        names: list[str] = []
        with os.scandir(fd) as items:
            for item in items:
                if len(names) >= MAX_NAMES:
                    self.cut = True
                    break
                if not item.name.startswith((removal.TRASH, UPLOAD)) and not (
                    top and item.name == STAGING
                ):
                    names.append(item.name)
        names.sort(reverse=True)
        return names


def _entry(path: str, status: os.stat_result) -> list[Any]:
    mode = status.st_mode
    kind = (
        FILE
        if stat.S_ISREG(mode)
        else DIRECTORY
        if stat.S_ISDIR(mode)
        else LINK
        if stat.S_ISLNK(mode)
        else ""
    )
    size = status.st_size if kind == FILE else 0
    return [
        path, kind, stat.S_IMODE(mode), size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino,
    ]  # fmt: skip


def send_entries(scan: Scan, stream: Stream) -> Iterator[None]:
    lines: list[bytes] = []
    size = 0
    for entry in scan.entries():
        if entry is not None:
            line = minijson.dumps(entry)
            lines.append(line)
            size += len(line)
        if size >= BATCH:
            stream.send(frames.DATA, b"\n".join(lines) + b"\n")
            lines, size = [], 0
        yield
    if lines:
        stream.send(frames.DATA, b"\n".join(lines) + b"\n")


def send_contents(workspace: Workspace, paths: list[str], stream: Stream) -> Iterator[None]:
    """
    Send each file: an event for its start, its bytes, events for its holes, an event for its end.
    """
    for index, path in enumerate(paths):
        try:
            fd = permissions.open_file(workspace.root, path)
        except FileError as error:
            stream.event({"event": "gone", "index": index, "why": error.code})
            yield
            continue
        try:
            status = os.fstat(fd)
            now = coarse_now()
            while status.st_ctime_ns >= now == coarse_now():
                yield  # It could change after it was read and keep its change time.
            stream.event({"event": "file", "index": index, "entry": _entry(path, status)})
            yield
            left = status.st_size
            for offset, length in _extents(fd, left):
                if offset is None:
                    stream.event({"event": "hole", "length": length})
                    continue
                end = offset + length
                while offset < end:
                    data = os.pread(fd, min(frames.CHUNK, end - offset), offset)
                    if not data:
                        break  # It has become shorter; the end event reports the change.
                    offset += len(data)
                    stream.send(frames.DATA, data)
                    yield
            after = os.fstat(fd)
            same = (after.st_size, after.st_ctime_ns) == (status.st_size, status.st_ctime_ns)
            stream.event({"event": "over", "index": index, "same": same})
            yield
        finally:
            os.close(fd)


def _extents(fd: int, size: int) -> Iterator[tuple[int | None, int]]:
    """Offset and length of each range of data; of a hole, None and the length."""
    offset = 0
    while offset < size:
        try:
            start = min(os.lseek(fd, offset, os.SEEK_DATA), size)
        except OSError as error:
            # Otherwise the file system does not support it: everything is data.
            start = size if error.errno == errno.ENXIO else offset
        if start > offset:
            yield None, start - offset
            offset = start
            continue
        try:
            end = min(os.lseek(fd, offset, os.SEEK_HOLE), size)
        except OSError:
            end = size
        if end <= offset:
            end = size
        yield offset, end - offset
        offset = end
