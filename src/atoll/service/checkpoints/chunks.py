"""
Content-addressed storage of one session's checkpoints, below a prefix in the blob store.

Objects are named by their SHA-256: an object that is known to exist is not written again, and what
is read is verified. The last few objects are cached, so that many small files of one object cost
one read. The size of this cache and the number of concurrent writes bound the memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from atoll.blobs.base import OversizedBlob
from atoll.errors import CheckpointDamaged
from atoll.model.manifest import MAX_MANIFEST, MAX_OBJECT
from atoll.model.manifest_parser import read_manifest, read_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.blobs.base import Blobs
    from atoll.model.manifest import Entry, Manifest, Part

AT_ONCE = 4
"""Concurrent reads and writes."""
CACHED = 6
"""Objects in the cache; each has at most 8 MiB."""


def prefix_of(session_id: str) -> str:
    return f"workspaces/{session_id}/"


def data_of(session_id: str) -> str:
    return f"{prefix_of(session_id)}data/"


def manifest_of(session_id: str, number: int, data: bytes) -> str:
    """Includes the digest, so that two checkpoints with the same number differ."""
    return f"{prefix_of(session_id)}manifests/{number:08d}-{digest(data)}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def stored(blobs: Blobs, key: str, expected: str | None, limit: int) -> bytes:
    """
    An object of at most `limit` bytes with the `expected` digest, if that is known. Raises
    `CheckpointDamaged` if it is missing or has another digest.
    """
    try:
        data = await blobs.get(key, limit=limit)
    except OversizedBlob as error:
        raise CheckpointDamaged(error.message) from None
    if data is None:
        raise CheckpointDamaged(f"Object {key} of a checkpoint is missing in the blob store.")
    if expected is not None and await asyncio.to_thread(digest, data) != expected:
        raise CheckpointDamaged(f"Object {key} of a checkpoint is damaged in the blob store.")
    return data


async def stored_manifest(blobs: Blobs, session_id: str, key: str) -> Manifest:
    """The manifest that a record of the session names."""
    _, named, expected = key.rpartition("/")[2].partition("-")
    # Manifests of earlier versions have no digest in their key.
    data = await stored(blobs, key, expected if named else None, MAX_MANIFEST)
    return await asyncio.to_thread(read_manifest, data, session_id)


class ChunkStore:
    def __init__(self, blobs: Blobs, session_id: str) -> None:
        self._blobs = blobs
        self._data = data_of(session_id)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._known: set[str] = set()
        self._read: OrderedDict[str, asyncio.Future[bytes]] = OrderedDict()

    def add_known(self, names: Iterable[str]) -> None:
        """Record that these objects exist."""
        self._known.update(names)

    async def put(self, name: str, data: bytes) -> None:
        if name in self._known:
            return
        async with self._slots:
            await self._blobs.put(self._data + name, data)
        self._known.add(name)

    async def get(self, name: str) -> bytes:
        """Content of an object; `CheckpointDamaged` if it is missing or damaged."""
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = asyncio.ensure_future(self._fetch(name))
            while len(self._read) > CACHED:
                self._read.popitem(last=False)
        else:
            self._read.move_to_end(name)
        try:
            return await asyncio.shield(found)
        except BaseException:
            if self._read.get(name) is found and found.done():
                del self._read[name]
            raise

    async def _fetch(self, name: str) -> bytes:
        async with self._slots:
            return await stored(self._blobs, self._data + name, name, MAX_OBJECT)

    async def part(self, part: Part) -> bytes:
        """Content of a part that is not a hole."""
        assert part.object is not None
        data = await self.get(part.object)
        if part.offset + part.length > len(data):
            raise CheckpointDamaged(
                f"Object {part.object} of a checkpoint is shorter than the checkpoint says.",
            )
        return data[part.offset : part.offset + part.length]

    async def page(self, name: str) -> list[Entry]:
        """The entries of a page."""
        data = await self.get(name)
        return await asyncio.to_thread(read_page, data)

    async def remove(self, names: Iterable[str]) -> None:
        async def one(name: str) -> None:
            async with self._slots:
                # Not later: another node may have stored the same object again by then.
                await self._blobs.remove(self._data + name, deferrable=False)

        await asyncio.gather(*(one(name) for name in names))
