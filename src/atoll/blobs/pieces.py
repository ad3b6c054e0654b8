"""A file in pieces, each read beside the event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from atoll.blobs.base import PIECE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import BinaryIO


class _Descriptor:
    """An open file that is closed with the last who knows it, however that one ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._number = os.dup(file.fileno())

    def read(self, size: int, at: int) -> bytes:
        return os.pread(self._number, size, at)

    def __del__(self) -> None:
        os.close(self._number)


def pieces_of(file: BinaryIO, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes from `start` to `stop`; the file may be closed meanwhile."""
    return _pieces(_Descriptor(file), start, stop)


async def _pieces(file: _Descriptor, start: int, stop: int) -> AsyncIterator[bytes]:
    for begin in range(start, stop, PIECE):
        yield await asyncio.to_thread(file.read, min(PIECE, stop - begin), begin)
