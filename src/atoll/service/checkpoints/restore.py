"""
A checkpoint written into a workspace that nobody uses yet.

Several streams at once carry files, each object is read once and checked, and directories get their
modes and times when all is in them. Whoever calls this throws the workspace away when it fails.
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
AHEAD = 16
"""Entries that wait for a stream; one may have many parts."""
TOGETHER = 64 * 1024
"""Bytes that are sent together at least."""


class Restore:
    def __init__(self, link: Link, objects: ChunkStore, manifest: Manifest) -> None:
        self._link = link
        self._objects = objects
        self._manifest = manifest
        self._files: asyncio.Queue[Entry | None] = asyncio.Queue(AHEAD)
        self._carried = asyncio.Event()

    async def run(self) -> int:
        """How many entries were made."""
        try:
            async with asyncio.TaskGroup() as group:
                rest = group.create_task(self._link.push("populate", self._directories()))
                carriers = [
                    group.create_task(self._link.push("populate", _gathered(self._contents())))
                    for _ in range(STREAMS)
                ]
                group.create_task(self._when_carried(carriers))
        except ExceptionGroup as errors:
            # One reason is enough to tell; the others are its consequences.
            raise first(errors) from None
        return sum(int(task.result()["made"]) for task in (rest, *carriers))

    async def _when_carried(self, carriers: list[asyncio.Task[dict[str, object]]]) -> None:
        await asyncio.gather(*carriers)
        self._carried.set()

    async def _directories(self) -> AsyncIterator[bytes]:
        """All but files; those are put in line for the other streams."""
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
        await self._carried.wait()

    async def _contents(self) -> AsyncIterator[bytes]:
        while (entry := await self._files.get()) is not None:
            yield _header(entry, None)
            place = 0
            for part in entry.parts:
                if part.object is not None:
                    data = await self._objects.part(part)
                    # With its place in front: all of them together may be very many.
                    yield EXTENT.pack(place, part.length)
                    yield data
                place += part.length
            yield EXTENT.pack(place, 0)


async def _gathered(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same in larger pieces: each one that is sent is answered."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) >= TOGETHER:
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
