"""
Receives the list of a workspace's files from the executor, and validates it.

User code is frozen while the executor sends the list. So the list is received as fast as it comes
and spooled, in memory and beyond that in a file, before it is processed. What exceeds the spool is
received while it is processed; user code is no longer frozen then.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import aclosing
from typing import IO, TYPE_CHECKING, Any

from atoll.link.errors import ProtocolViolation
from atoll.model import manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link
    from atoll.model.manifest import Entry

MAX_IN_MEMORY = 4 * 2**20
MAX_ON_DISK = 512 * 2**20
PIECE = 2**20
"""Bytes that are written and read at once."""


async def scan(link: Link) -> AsyncIterator[bytes | dict[str, Any]]:
    """The lines of the list, in pieces that may end anywhere; the executor's answer comes last."""
    answer: dict[str, Any] | None = None
    with tempfile.SpooledTemporaryFile(max_size=MAX_IN_MEMORY) as spool:
        # Closed explicitly, however this ends: user code stays frozen until then.
        async with aclosing(link.pull("scan", freeze=True)) as received:  # type: ignore[type-var]
            waiting, size = bytearray(), 0
            async for item in received:
                if isinstance(item, dict):
                    answer = item
                    continue
                waiting += item
                size += len(item)
                if len(waiting) >= PIECE:
                    await _write(spool, waiting, size)
                if size >= MAX_ON_DISK:
                    break
            await _write(spool, waiting, size)
            spool.seek(0)
            while piece := await _read(spool, size):
                yield piece
            async for item in received:
                yield item
        if answer is not None:
            yield answer


async def _write(spool: IO[bytes], data: bytearray, size: int) -> None:
    if size <= MAX_IN_MEMORY:
        spool.write(data)
    else:
        await asyncio.to_thread(spool.write, bytes(data))
    data.clear()


async def _read(spool: IO[bytes], size: int) -> bytes:
    if size <= MAX_IN_MEMORY:
        return spool.read(PIECE)
    return await asyncio.to_thread(spool.read, PIECE)


def violation(what: str) -> ProtocolViolation:
    return ProtocolViolation(f"The executor sent {what[:200]}.")


def parse_line(line: bytes) -> Entry:
    try:
        return parse_entry(json.loads(line))
    except (ValueError, RecursionError):
        raise violation("an invalid entry") from None


def parse_entry(fields: object) -> Entry:
    try:
        if isinstance(fields, list):
            return manifest.parse_entry(fields)
    except (ValueError, TypeError, OverflowError):
        pass
    raise violation("an invalid entry")


def number_of(item: dict[str, Any], name: str, below: int) -> int:
    number = item.get(name)
    if not isinstance(number, int) or not 0 <= number < below:
        raise violation(f"{name} {number!r}")
    return number
