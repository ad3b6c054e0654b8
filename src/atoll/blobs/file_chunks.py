"""Reads a file in chunks, in a thread."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from atoll.blobs.base import CHUNK_SIZE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import BinaryIO


class _Descriptor:
    """An open file that is closed with its last reference, even if a reader is abandoned."""

    def __init__(self, file: BinaryIO) -> None:
        self._number = os.dup(file.fileno())

    def read(self, size: int, at: int) -> bytes:
        return os.pread(self._number, size, at)

    def __del__(self) -> None:
        os.close(self._number)


def file_chunks(file: BinaryIO, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes from `start` to `stop`; the caller may close the file meanwhile."""
    return _chunks(_Descriptor(file), start, stop)


async def _chunks(file: _Descriptor, start: int, stop: int) -> AsyncIterator[bytes]:
    for begin in range(start, stop, CHUNK_SIZE):
        yield await asyncio.to_thread(file.read, min(CHUNK_SIZE, stop - begin), begin)
