"""
Writes the entries of a checkpoint into a workspace that nothing else uses yet.

Directories get their modes and times at the end, so that read-only ones can be filled.
"""

from __future__ import annotations

import os

from ...protocol import frames, minijson
from .checkpoint_scan import DIRECTORY, LINK
from .paths import open_below, split, translate
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_HEADER = 256 * 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Population:
    """Receives entries: of each a length, JSON, and, for a file, its extents."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._buffer = bytearray()
        self._file = -1
        self._entry: list[Any] = []
        self._offset = self._left = 0
        """Where the rest of the current extent goes, and its bytes."""
        self._directories: list[list[Any]] = []
        self._made = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._consume():
            pass

    def _consume(self) -> bool:
        """Process one part of the buffer; returns whether there may be another."""
        buffer = self._buffer
        if self._left:
            piece = bytes(buffer[: self._left])
            if not piece:
                return False
            del buffer[: len(piece)]
            self._left -= len(piece)
            while piece:
                written = os.pwrite(self._file, piece, self._offset)
                self._offset += written
                piece = piece[written:]
            return True
        if self._file >= 0:
            if len(buffer) < frames.EXTENT.size:
                return False
            self._offset, self._left = frames.EXTENT.unpack(bytes(buffer[: frames.EXTENT.size]))
            del buffer[: frames.EXTENT.size]
            if not self._left:
                self._close()
            return True
        if len(buffer) < 4:
            return False
        size = int.from_bytes(buffer[:4], "big")
        if size > MAX_HEADER:
            raise ValueError("an entry of %d bytes" % size)
        if len(buffer) < 4 + size:
            return False
        entry = minijson.loads(bytes(buffer[4 : 4 + size]))
        del buffer[: 4 + size]
        self._begin(entry)
        return True

    def _begin(self, entry: list[Any]) -> None:
        path, kind, mode, size, modified, target = entry
        self._made += 1
        try:
            parent, name = self._workspace.reach_parent(path, make=True)
            try:
                if kind == DIRECTORY:
                    try:
                        os.mkdir(name, 0o700, dir_fd=parent)
                    except FileExistsError:
                        pass  # Another stream has made it for an entry in it.
                    self._directories.append([path, mode, modified])
                elif kind == LINK:
                    os.symlink(target, name, dir_fd=parent)
                    os.utime(name, ns=(modified, modified), dir_fd=parent, follow_symlinks=False)
                else:
                    self._file = os.open(name, _NEW, 0o600, dir_fd=parent)
                    os.ftruncate(self._file, size)
                    self._entry = entry
            finally:
                os.close(parent)
        except OSError as error:
            raise translate(error, path) from None

    def _close(self) -> None:
        fd, self._file = self._file, -1
        try:
            os.fchmod(fd, self._entry[2])
            os.utime(fd, ns=(self._entry[4], self._entry[4]))
        finally:
            os.close(fd)

    def finish(self) -> int:
        if self._file >= 0 or self._buffer:
            self.abandon()
            raise ValueError("the stream ends within an entry")
        # Deepest first: afterwards their parents may not be accessible any more.
        for path, mode, modified in reversed(self._directories):
            fd = open_below(self._workspace.root, split(path))
            try:
                os.utime(fd, ns=(modified, modified))
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
        return self._made

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
