"""
Writes a checkpoint into a new workspace.

Files are sent in several concurrent streams, each object is read once and verified, and directories
get their modes and times when they are complete. After a failure the caller discards the workspace.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from atoll.model.manifest import DIRECTORY, FILE, SYMLINK, Entry
from atoll.model.manifest_parser import TreeOrder
from atoll.protocol.frames import EXTENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link
    from atoll.model.manifest import Manifest
    from atoll.service.checkpoints.chunks import ChunkStore

STREAMS = 4
QUEUE_SIZE = 16
"""Files that wait for a stream; each may have many parts."""
MIN_PIECE = 64 * 1024
"""Bytes that are sent at once at least."""


class Restore:
    def __init__(self, link: Link, objects: ChunkStore, manifest: Manifest) -> None:
        self._link = link
        self._objects = objects
        self._manifest = manifest
        self._files: asyncio.Queue[Entry | None] = asyncio.Queue(QUEUE_SIZE)
        self._files_sent = asyncio.Event()

    async def run(self) -> int:
        """Returns the number of entries that were created."""
        try:
            async with asyncio.TaskGroup() as group:
                rest = group.create_task(self._link.push("populate", self._directories()))
                senders = [
                    group.create_task(self._link.push("populate", _batched(self._contents())))
                    for _ in range(STREAMS)
                ]
                group.create_task(self._when_files_sent(senders))
        except ExceptionGroup as errors:
            # The first error is the cause; the others are consequences.
            raise first(errors) from None
        return sum(int(task.result()["made"]) for task in (rest, *senders))

    async def _when_files_sent(self, senders: list[asyncio.Task[dict[str, object]]]) -> None:
        await asyncio.gather(*senders)
        self._files_sent.set()

    async def _directories(self) -> AsyncIterator[bytes]:
        """Everything but files, which are queued for the other streams."""
        order = TreeOrder()
        for _, name in self._manifest.pages:
            for entry in await self._objects.page(name):
                order.check(entry)
                if entry.kind == FILE:
                    await self._files.put(entry)
                elif entry.kind == DIRECTORY:
                    yield _header(entry, None)
                elif entry.kind == SYMLINK:
                    yield _header(entry, entry.target)
        for _ in range(STREAMS):
            await self._files.put(None)
        await self._files_sent.wait()

    async def _contents(self) -> AsyncIterator[bytes]:
        while (entry := await self._files.get()) is not None:
            yield _header(entry, None)
            place = 0
            for part in entry.parts:
                if part.object is not None:
                    data = await self._objects.part(part)
                    # Offsets are sent with the data: a list of all parts could be very long.
                    yield EXTENT.pack(place, part.length)
                    yield data
                place += part.length
            yield EXTENT.pack(place, 0)


async def _batched(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same data in larger pieces, because each piece is acknowledged."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) >= MIN_PIECE:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _header(entry: Entry, more: object) -> bytes:
    fields = [entry.path, entry.kind, entry.mode, entry.size, entry.modified, more]
    body = json.dumps(fields, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body
