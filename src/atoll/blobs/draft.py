"""An object that is being written to the spool; what it may take is reserved beforehand."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.waiting import Waiting

BLOCK = 4096
"""Bytes that the smallest file takes."""
_STEP = 8 * 1024 * 1024
"""Bytes that a draft of unknown size asks for at a time."""


class Draft:
    """It may be dropped while another thread writes it."""

    def __init__(self, waiting: Waiting, path: Path, file: BinaryIO) -> None:
        self._waiting = waiting
        self._path = path
        self._file = file
        self._reserved = 0
        self._size = 0
        self._mutex = threading.Lock()

    def reserve(self, size: int) -> None:
        """Make sure of room for so many bytes."""
        self._waiting.reserve(blocks(size))
        self._reserved += blocks(size)

    def write(self, data: bytes) -> None:
        with self._mutex:
            if self._file.closed:
                return
            if self._size + len(data) > self._reserved:
                self.reserve(max(_STEP, len(data)))
            self._file.write(data)
            self._size += len(data)

    def commit(self, key: str, *, only_new: bool = False) -> bool:
        """False when there is one already and this is to be `only_new`."""
        with self._mutex:
            self._file.flush()
            os.fsync(self._file.fileno())
            taken = self._waiting.take(
                self._path, key, self._size, self._reserved, only_new=only_new
            )
            if taken:
                self._reserved = 0
            return taken

    def drop(self) -> None:
        """Give back what it holds; nothing is left to do when it was committed."""
        with self._mutex:
            if self._file.closed:
                return
            self._file.close()
            self._path.unlink(missing_ok=True)
            if self._reserved:
                self._waiting.reserve(-self._reserved)
                self._reserved = 0


def blocks(size: int) -> int:
    """Bytes that a file of this size takes."""
    return max(1, -(-size // BLOCK)) * BLOCK
