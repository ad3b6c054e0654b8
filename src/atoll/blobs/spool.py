"""
Blobs of a remote store, with a spool on this node's disk for when the store is unavailable.

It keeps the contract of blobs. While the store is unavailable (`availability`), objects put beneath
the given prefixes wait in the spool (`spool_queue`), from which only this node can read them; other
keys can be neither put nor read. Removals wait too, whatever their key. Listing needs the store,
because half a list would mislead.

As long as something waits for a key, all calls on that key use the spool, and only `spool_uploader`
moves it to the store. So the last write on this node is also the last write in the store.

The spool is bounded in size (`SpoolFull` beyond that) and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

from atoll.blobs import local_listing
from atoll.blobs.availability import Availability
from atoll.blobs.base import (
    MAX_GET,
    PAGE_SIZE,
    OpenBlob,
    check_expiry,
    check_key,
    check_page,
    check_prefix,
    check_size,
)
from atoll.blobs.file_chunks import file_chunks
from atoll.blobs.spool_queue import SpoolQueue, SpoolState, on_disk
from atoll.blobs.spool_uploader import SpoolUploader, is_manifest
from atoll.errors import BlobsUnavailable, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from datetime import timedelta
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo, Blobs, Method
    from atoll.blobs.spool_queue import PendingRemoval, SpoolUsage
    from atoll.blobs.spool_writer import SpoolWriter
    from atoll.clock import Clock
    from atoll.settings import BlobSettings


class Spool:
    def __init__(
        self,
        remote: Blobs,
        directory: Path,
        settings: BlobSettings,
        clock: Clock,
        *,
        prefixes: tuple[str, ...],
    ) -> None:
        for prefix in prefixes:
            check_prefix(prefix)
        self._remote = remote
        self._prefixes = prefixes
        self._queue = SpoolQueue(directory, settings.spool_size)
        self._availability = Availability(remote, prefixes[0], settings, clock)
        self._uploader = SpoolUploader(
            remote, self._queue, self._availability, clock, settings.spool_ttl
        )

    @property
    def away(self) -> str | None:
        """Why the store failed last; None while it is available."""
        return self._availability.away

    @property
    def usage(self) -> SpoolUsage:
        """The number and size of spooled entries, for all processes of this node."""
        return self._queue.used()

    # The contract of blobs

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        if await self._goes_to_store(key):
            try:
                return await self._availability.call(lambda: self._remote.put(key, data))
            except TemporaryError as error:
                self._reraise_unless_spooled(key, error)
        await self._spool(key, data, create=False)

    async def create(self, key: str, data: bytes) -> bool:
        """While the store is unavailable, only this node's spool is checked for the key."""
        check_key(key)
        if await self._goes_to_store(key):
            try:
                return await self._availability.call(lambda: self._remote.create(key, data))
            except TemporaryError as error:
                self._reraise_unless_spooled(key, error)
        return await self._spool(key, data, create=True)

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """Chunks are written to the disk as well, because they cannot be read a second time."""
        check_key(key)
        direct = await self._goes_to_store(key)
        if not self._is_spooled(key):
            return await self._availability.call(lambda: self._remote.write(key, chunks))
        with on_disk():
            writer = await asyncio.to_thread(self._queue.writer)
        try:
            return await self._write(key, chunks, writer, direct)
        finally:
            await asyncio.to_thread(writer.drop)

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        check_key(key)

        def read() -> tuple[SpoolState, bytes | None]:
            file = self._queue.open(key)
            if file is None:
                return self._queue.state_of(key), None
            with file:
                size = os.fstat(file.fileno()).st_size
                wanted = max(0, (size if end is None else min(end, size)) - start)
                check_size(key, wanted, limit)
                file.seek(start)
                return SpoolState.OBJECT, file.read(wanted)

        with on_disk():
            held, data = await asyncio.to_thread(read)
        if data is not None or held is SpoolState.REMOVED:
            return data
        return await self._availability.call(
            lambda: self._remote.get(key, start=start, end=end, limit=limit)
        )

    async def head(self, key: str) -> BlobInfo | None:
        opened = await self._open(key)
        if isinstance(opened, SpoolState):
            if opened is SpoolState.REMOVED:
                return None
            return await self._availability.call(lambda: self._remote.head(key))
        info, file = opened
        file.close()
        return info

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> OpenBlob | None:
        opened = await self._open(key)
        if isinstance(opened, SpoolState):
            if opened is SpoolState.REMOVED:
                return None
            return await self._availability.call(
                lambda: self._remote.open(key, start=start, end=end)
            )
        info, file = opened
        with file:
            stop = info.size if end is None else min(end, info.size)
            return OpenBlob(info, file_chunks(file, start, stop))

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE_SIZE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)
        with on_disk():
            # Before the store: an object uploaded in between is then seen twice, not missed.
            here = await asyncio.to_thread(self._queue.objects, directory, after, limit)
            removals = await asyncio.to_thread(self._queue.any_removals)
        found = {info.key: info for info in here}
        there: list[BlobInfo] = []
        reached = after
        while len(there) < limit:
            page = await self._availability.call(
                partial(self._remote.list, prefix, after=reached, limit=limit)
            )
            shown = page
            if removals and page:
                with on_disk():
                    shown = await asyncio.to_thread(_without_removed, self._queue, page)
            there += shown
            if len(page) < limit:
                break
            reached = page[-1].key
        merged = {info.key: info for info in there} | found
        return [merged[key] for key in sorted(merged)[:limit]]

    async def is_synced(self, prefix: str) -> bool:
        directory = check_prefix(prefix)

        def nothing_waits() -> bool:
            if self._queue.objects(directory, None, 1) or self._queue.removals_of(f"{prefix}any"):
                return False
            after = ""
            while removals := self._queue.removals(after, PAGE_SIZE):
                if any(removal.what.startswith(prefix) for removal in removals):
                    return False
                after = removals[-1].name
            return True

        with on_disk():
            return await asyncio.to_thread(nothing_waits)

    async def remove(self, key: str, *, deferrable: bool = True) -> None:
        check_key(key)
        with on_disk():
            held = await asyncio.to_thread(self._queue.state_of, key)
        await self._remove(key, held, lambda: self._remote.remove(key), deferrable=deferrable)

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        directory = check_prefix(prefix)

        def state() -> SpoolState:
            beneath = self._queue.objects(directory, None, 1)
            return SpoolState.OBJECT if beneath else self._queue.state_of(f"{prefix}any")

        with on_disk():
            found = await asyncio.to_thread(state)
        await self._remove(
            prefix, found, lambda: self._remote.remove_all(prefix), deferrable=deferrable
        )

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        """Also None while the store is unavailable, or while something waits for the key."""
        check_key(key)
        check_expiry(expires)
        if self._availability.away is not None:
            return None
        with on_disk():
            if await asyncio.to_thread(self._queue.state_of, key) is not SpoolState.NOTHING:
                return None
        return await self._remote.presign(method, key, expires)

    # Upload

    async def run(self) -> None:
        """Upload the spool until cancelled."""
        await self._uploader.run()

    async def catch_up(self) -> bool:
        """
        Upload the spool; true if it is empty then. False too while another process uploads it.
        """
        return await self._uploader.catch_up()

    # Spool or store

    def _is_spooled(self, key: str) -> bool:
        return key.startswith(self._prefixes)

    def _reraise_unless_spooled(self, key: str, error: TemporaryError) -> None:
        if not isinstance(error, BlobsUnavailable) or not self._is_spooled(key):
            raise error

    async def _goes_to_store(self, key: str) -> bool:
        """Whether a new object may go directly to the store; otherwise it must be spooled."""
        spooled = self._is_spooled(key)

        def state_of() -> tuple[SpoolState, list[PendingRemoval], bool]:
            held, removals = self._queue.state_of(key), self._queue.removals_of(key)
            behind = spooled and is_manifest(key) and self._queue.any_objects()
            return held, removals, behind

        with on_disk():
            held, removals, behind = await asyncio.to_thread(state_of)
            if held is SpoolState.NOTHING and not behind:
                return True
            if spooled:
                return False
            # It cannot be spooled, so the pending removals of its key must be applied now.
            with self._queue.upload_lock() as locked:
                if not locked:
                    raise self._availability.unavailable("a removal is in progress")
                for removal in removals:
                    await self._availability.call(partial(self._uploader.apply, removal))
                    await asyncio.to_thread(self._queue.forget_removal, removal)
        return True

    async def _spool(self, key: str, data: bytes, *, create: bool) -> bool:
        with on_disk():
            kept = await asyncio.to_thread(self._queue.put, key, data, create=create)
        self._availability.changed.set()
        return kept

    async def _write(
        self, key: str, chunks: AsyncIterator[bytes], writer: SpoolWriter, direct: bool
    ) -> int:
        size, at_source = 0, False
        full: TemporaryError | None = None

        async def copying() -> AsyncGenerator[bytes, None]:
            nonlocal size, at_source, full
            at_source = True
            async for chunk in chunks:
                size += len(chunk)
                if full is None:
                    try:
                        with on_disk():
                            await asyncio.to_thread(writer.write, chunk)
                    except TemporaryError as error:
                        # Not needed as long as the store accepts the object.
                        full = error
                at_source = False
                yield chunk
                at_source = True
            at_source = False

        async with contextlib.aclosing(copying()) as copied:
            if direct:
                try:
                    return await self._availability.call(lambda: self._remote.write(key, copied))
                except BlobsUnavailable:
                    if at_source:
                        raise
        async with contextlib.aclosing(copying()) as rest:
            async for _ in rest:
                if full is not None:
                    raise full
        if full is not None:
            raise full
        with on_disk():
            await asyncio.to_thread(writer.commit, key)
        self._availability.changed.set()
        return size

    async def _open(self, key: str) -> tuple[BlobInfo, BinaryIO] | SpoolState:
        check_key(key)

        def opened() -> tuple[BlobInfo, BinaryIO] | SpoolState:
            file = self._queue.open(key)
            if file is None:
                return self._queue.state_of(key)
            return local_listing.describe(key, os.fstat(file.fileno())), file

        with on_disk():
            return await asyncio.to_thread(opened)

    async def _remove(
        self, what: str, held: SpoolState, call_: Callable[[], Awaitable[None]], *, deferrable: bool
    ) -> None:
        if held is SpoolState.NOTHING:
            try:
                return await self._availability.call(call_)
            except BlobsUnavailable:
                if not deferrable:
                    raise
        if not deferrable:
            raise self._availability.unavailable("a change to it waits on this node")
        with on_disk():
            await asyncio.to_thread(self._queue.remove, what)
        self._availability.changed.set()


def _without_removed(queue: SpoolQueue, page: list[BlobInfo]) -> list[BlobInfo]:
    return [info for info in page if not queue.removals_of(info.key)]
