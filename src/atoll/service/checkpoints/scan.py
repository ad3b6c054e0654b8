"""
The list of a workspace's files, taken from an executor at once.

User code stands still while the executor tells the list, so it is taken as fast as it comes and put
aside, in memory or beyond that in a file, before anything is done with it. Of a list that is larger
than may be put aside the rest is taken as it is needed; user code does not wait for that.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link

IN_MEMORY = 4 * 2**20
ON_DISK = 512 * 2**20
PIECE = 2**20
"""Bytes that are written and read together."""


async def listed(link: Link) -> AsyncIterator[bytes | dict[str, Any]]:
    """The lines as `scan` sends them, in pieces that may end anywhere; its answer comes last."""
    answer: dict[str, Any] | None = None
    with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as aside:
        # Closed here and now, however this ends: until then user code stands still.
        async with aclosing(link.pull("scan", freeze=True)) as told:  # type: ignore[type-var]
            waiting, size = bytearray(), 0
            async for item in told:
                if isinstance(item, dict):
                    answer = item
                    continue
                waiting += item
                size += len(item)
                if len(waiting) >= PIECE:
                    await _write(aside, waiting, size)
                if size >= ON_DISK:
                    break
            await _write(aside, waiting, size)
            aside.seek(0)
            while piece := await _read(aside, size):
                yield piece
            async for item in told:
                yield item
        if answer is not None:
            yield answer


async def _write(aside: IO[bytes], data: bytearray, size: int) -> None:
    if size <= IN_MEMORY:
        aside.write(data)
    else:
        await asyncio.to_thread(aside.write, bytes(data))
    data.clear()


async def _read(aside: IO[bytes], size: int) -> bytes:
    if size <= IN_MEMORY:
        return aside.read(PIECE)
    return await asyncio.to_thread(aside.read, PIECE)
