"""
The objects of one session's checkpoints, beneath a prefix of its own in the blob store.

Named by their content: one that is known to be there is not written again, and what is read is
checked. A few that were read last are kept, so that many small files of one object cost one read;
memory is bounded by their number and by how many are written at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from atoll.errors import PermanentError
from atoll.model.manifest import read_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.blobs.base import Blobs
    from atoll.model.manifest import Entry

AT_ONCE = 4
DAMAGED = "checkpoint_damaged"
KEPT = 6
"""Objects that stay in memory while a checkpoint is read; each has at most 8 MiB."""


def prefix_of(session_id: str) -> str:
    return f"workspaces/{session_id}/"


def data_of(session_id: str) -> str:
    return f"{prefix_of(session_id)}data/"


def manifest_of(session_id: str, number: int, data: bytes) -> str:
    """Named by its content too, so that two who take the same number do not meet."""
    return f"{prefix_of(session_id)}manifests/{number:08d}-{digest(data)}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class SessionObjects:
    def __init__(self, blobs: Blobs, session_id: str) -> None:
        self._blobs = blobs
        self._data = data_of(session_id)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._known: set[str] = set()
        self._read: OrderedDict[str, asyncio.Future[bytes]] = OrderedDict()

    def know(self, names: Iterable[str]) -> None:
        """These are there."""
        self._known.update(names)

    async def put(self, name: str, data: bytes) -> None:
        if name in self._known:
            return
        async with self._slots:
            await self._blobs.put(self._data + name, data)
        self._known.add(name)

    async def get(self, name: str) -> bytes:
        """Its content; `PermanentError` when it is gone or damaged."""
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = asyncio.ensure_future(self._fetch(name))
            while len(self._read) > KEPT:
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
            data = await self._blobs.get(self._data + name)
        if data is None:
            raise PermanentError(
                f"Object {name} of a checkpoint is gone from the blob store.",
                code=DAMAGED,
            )
        if await asyncio.to_thread(digest, data) != name:
            raise PermanentError(
                f"Object {name} of a checkpoint is damaged in the blob store.",
                code=DAMAGED,
            )
        return data

    async def page(self, name: str) -> list[Entry]:
        """The entries of a page."""
        data = await self.get(name)
        return await asyncio.to_thread(lambda: list(read_page(data)))

    async def remove(self, names: Iterable[str]) -> None:
        async def one(name: str) -> None:
            async with self._slots:
                # Done later it could take away what was put again meanwhile, by another node.
                await self._blobs.remove(self._data + name, later=False)

        await asyncio.gather(*(one(name) for name in names))
