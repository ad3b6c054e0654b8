"""Writes one object to the spool; its disk space is reserved beforehand."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.spool_queue import SpoolQueue

BLOCK = 4096
"""Bytes of disk that the smallest file takes."""
_STEP = 8 * 1024 * 1024
"""Bytes that an object of unknown size reserves at a time."""


class SpoolWriter:
    """May be dropped while another thread writes."""

    def __init__(self, queue: SpoolQueue, path: Path, file: BinaryIO) -> None:
        self._queue = queue
        self._path = path
        self._file = file
        self._reserved = 0
        self._size = 0
        self._mutex = threading.Lock()

    def reserve(self, size: int) -> None:
        """Reserve disk space for so many bytes."""
        self._queue.reserve(blocks(size))
        self._reserved += blocks(size)

    def write(self, data: bytes) -> None:
        with self._mutex:
            if self._file.closed:
                return
            if self._size + len(data) > self._reserved:
                self.reserve(max(_STEP, len(data)))
            self._file.write(data)
            self._size += len(data)

    def commit(self, key: str, *, create: bool = False) -> bool:
        """False if the key exists and `create` allows only a new one."""
        with self._mutex:
            self._file.flush()
            os.fsync(self._file.fileno())
            taken = self._queue.commit(self._path, key, self._size, self._reserved, create=create)
            if taken:
                self._reserved = 0
            return taken

    def drop(self) -> None:
        """Delete the file and release its space; does nothing after a commit."""
        with self._mutex:
            if self._file.closed:
                return
            self._file.close()
            self._path.unlink(missing_ok=True)
            if self._reserved:
                self._queue.reserve(-self._reserved)
                self._reserved = 0


def blocks(size: int) -> int:
    """Bytes of disk that a file of this size takes."""
    return max(1, -(-size // BLOCK)) * BLOCK
