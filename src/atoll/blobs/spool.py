"""
Blobs of a store that may be away, with what has to wait for it on this node's disk.

It keeps the contract of blobs. While the store is away (`reach`), what is put beneath the given
prefixes waits here (`waiting`) and is read from here, by this node alone; other keys are
unavailable, to put and to read. Removals wait too, whatever their key. A list needs the store: half
of one would mislead.

As long as something waits for a key, all calls on that key keep to the spool, and `moving` alone
takes it to the store. So what was last here is last there.

What waits is bounded in size (`TemporaryError`, `spool_full`, beyond that) and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

from atoll.blobs import tree
from atoll.blobs.base import (
    MAX_GET,
    PAGE,
    Opened,
    check_expiry,
    check_key,
    check_page,
    check_prefix,
    check_size,
)
from atoll.blobs.moving import Moving, is_manifest
from atoll.blobs.pieces import pieces_of
from atoll.blobs.reach import Reach
from atoll.blobs.waiting import Held, Waiting, on_disk
from atoll.errors import BlobsUnavailable, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from datetime import timedelta
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo, Blobs, Method
    from atoll.blobs.draft import Draft
    from atoll.blobs.waiting import Removal, Used
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
        self._waiting = Waiting(directory, settings.spool_size)
        self._reach = Reach(remote, prefixes[0], settings, clock)
        self._moving = Moving(remote, self._waiting, self._reach, clock, settings.spool_ttl)

    @property
    def away(self) -> str | None:
        """Why the store failed last, until it answers again; None when it is there."""
        return self._reach.away

    @property
    def waiting(self) -> Used:
        """How much waits, for all processes on this node."""
        return self._waiting.used()

    # The contract of blobs

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        if await self._past_spool(key):
            try:
                return await self._reach.ask(lambda: self._remote.put(key, data))
            except TemporaryError as error:
                self._reraise_unless_kept(key, error)
        await self._keep(key, data, only_new=False)

    async def create(self, key: str, data: bytes) -> bool:
        """While the store is away, "no object has the key" is as far as this node knows."""
        check_key(key)
        if await self._past_spool(key):
            try:
                return await self._reach.ask(lambda: self._remote.create(key, data))
            except TemporaryError as error:
                self._reraise_unless_kept(key, error)
        return await self._keep(key, data, only_new=True)

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """What goes to the store is written to the disk as well: chunks come only once."""
        check_key(key)
        direct = await self._past_spool(key)
        if not self._is_kept(key):
            return await self._reach.ask(lambda: self._remote.write(key, chunks))
        with on_disk():
            draft = await asyncio.to_thread(self._waiting.draft)
        try:
            return await self._write(key, chunks, draft, direct)
        finally:
            await asyncio.to_thread(draft.drop)

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        check_key(key)

        def read() -> tuple[Held, bytes | None]:
            file = self._waiting.open(key)
            if file is None:
                return self._waiting.look(key), None
            with file:
                size = os.fstat(file.fileno()).st_size
                wanted = max(0, (size if end is None else min(end, size)) - start)
                check_size(key, wanted, limit)
                file.seek(start)
                return Held.OBJECT, file.read(wanted)

        with on_disk():
            held, data = await asyncio.to_thread(read)
        if data is not None or held is Held.REMOVED:
            return data
        return await self._reach.ask(
            lambda: self._remote.get(key, start=start, end=end, limit=limit)
        )

    async def head(self, key: str) -> BlobInfo | None:
        opened = await self._open(key)
        if isinstance(opened, Held):
            if opened is Held.REMOVED:
                return None
            return await self._reach.ask(lambda: self._remote.head(key))
        info, file = opened
        file.close()
        return info

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> Opened | None:
        opened = await self._open(key)
        if isinstance(opened, Held):
            if opened is Held.REMOVED:
                return None
            return await self._reach.ask(lambda: self._remote.open(key, start=start, end=end))
        info, file = opened
        with file:
            stop = info.size if end is None else min(end, info.size)
            return Opened(info, pieces_of(file, start, stop))

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)
        with on_disk():
            # Before the store: what is moved in between is then seen twice, not never.
            here = await asyncio.to_thread(self._waiting.objects, directory, after, limit)
            removals = await asyncio.to_thread(self._waiting.any_removals)
        found = {info.key: info for info in here}
        there: list[BlobInfo] = []
        reached = after
        while len(there) < limit:
            page = await self._reach.ask(
                partial(self._remote.list, prefix, after=reached, limit=limit)
            )
            shown = page
            if removals and page:
                with on_disk():
                    shown = await asyncio.to_thread(_not_removed, self._waiting, page)
            there += shown
            if len(page) < limit:
                break
            reached = page[-1].key
        merged = {info.key: info for info in there} | found
        return [merged[key] for key in sorted(merged)[:limit]]

    async def is_home(self, prefix: str) -> bool:
        directory = check_prefix(prefix)

        def nothing_waits() -> bool:
            if self._waiting.objects(directory, None, 1) or self._waiting.covering(f"{prefix}any"):
                return False
            after = ""
            while removals := self._waiting.removals(after, PAGE):
                if any(removal.what.startswith(prefix) for removal in removals):
                    return False
                after = removals[-1].name
            return True

        with on_disk():
            return await asyncio.to_thread(nothing_waits)

    async def remove(self, key: str, *, later: bool = True) -> None:
        check_key(key)
        with on_disk():
            held = await asyncio.to_thread(self._waiting.look, key)
        await self._remove(key, held, lambda: self._remote.remove(key), later=later)

    async def remove_all(self, prefix: str, *, later: bool = True) -> None:
        directory = check_prefix(prefix)

        def held() -> Held:
            beneath = self._waiting.objects(directory, None, 1)
            return Held.OBJECT if beneath else self._waiting.look(f"{prefix}any")

        with on_disk():
            found = await asyncio.to_thread(held)
        await self._remove(prefix, found, lambda: self._remote.remove_all(prefix), later=later)

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        """None as well while the store could not serve it, or has not yet what waits here."""
        check_key(key)
        check_expiry(expires)
        if self._reach.away is not None:
            return None
        with on_disk():
            if await asyncio.to_thread(self._waiting.look, key) is not Held.NOTHING:
                return None
        return await self._remote.presign(method, key, expires)

    # Catching up

    async def run(self) -> None:
        """Move what waits, as long as this runs."""
        await self._moving.run()

    async def catch_up(self) -> bool:
        """
        Move to the store what waits; whether nothing does any more. False too while another
        process is at it.
        """
        return await self._moving.catch_up()

    async def drop_old(self) -> None:
        """Drop what has waited for too long."""
        await self._moving.drop_old()

    # What waits, and what does not

    def _is_kept(self, key: str) -> bool:
        return key.startswith(self._prefixes)

    def _reraise_unless_kept(self, key: str, error: TemporaryError) -> None:
        if not isinstance(error, BlobsUnavailable) or not self._is_kept(key):
            raise error

    async def _past_spool(self, key: str) -> bool:
        """Whether a new object may go to the store itself; else it has to wait here."""
        kept = self._is_kept(key)

        def look() -> tuple[Held, list[Removal], bool]:
            held, removals = self._waiting.look(key), self._waiting.covering(key)
            behind = kept and is_manifest(key) and self._waiting.any_objects()
            return held, removals, behind

        with on_disk():
            held, removals, behind = await asyncio.to_thread(look)
            if held is Held.NOTHING and not behind:
                return True
            if kept:
                return False
            # It may not wait, so what waits for its key has to be done now.
            with self._waiting.turn() as mine:
                if not mine:
                    raise self._reach.unavailable("a removal is under way")
                for removal in removals:
                    await self._reach.ask(partial(self._moving.apply, removal))
                    await asyncio.to_thread(self._waiting.done, removal)
        return True

    async def _keep(self, key: str, data: bytes, *, only_new: bool) -> bool:
        with on_disk():
            kept = await asyncio.to_thread(self._waiting.put, key, data, only_new=only_new)
        self._reach.news.set()
        return kept

    async def _write(
        self, key: str, chunks: AsyncIterator[bytes], draft: Draft, direct: bool
    ) -> int:
        size, at_source = 0, False
        full: TemporaryError | None = None

        async def noted() -> AsyncGenerator[bytes, None]:
            nonlocal size, at_source, full
            at_source = True
            async for chunk in chunks:
                size += len(chunk)
                if full is None:
                    try:
                        with on_disk():
                            await asyncio.to_thread(draft.write, chunk)
                    except TemporaryError as error:
                        # Not needed as long as the store takes it.
                        full = error
                at_source = False
                yield chunk
                at_source = True
            at_source = False

        async with contextlib.aclosing(noted()) as copied:
            if direct:
                try:
                    return await self._reach.ask(lambda: self._remote.write(key, copied))
                except BlobsUnavailable:
                    if at_source:
                        raise
        async with contextlib.aclosing(noted()) as rest:
            async for _ in rest:
                if full is not None:
                    raise full
        if full is not None:
            raise full
        with on_disk():
            await asyncio.to_thread(draft.commit, key)
        self._reach.news.set()
        return size

    async def _open(self, key: str) -> tuple[BlobInfo, BinaryIO] | Held:
        check_key(key)

        def opened() -> tuple[BlobInfo, BinaryIO] | Held:
            file = self._waiting.open(key)
            if file is None:
                return self._waiting.look(key)
            return tree.described(key, os.fstat(file.fileno())), file

        with on_disk():
            return await asyncio.to_thread(opened)

    async def _remove(
        self, what: str, held: Held, call: Callable[[], Awaitable[None]], *, later: bool
    ) -> None:
        if held is Held.NOTHING:
            try:
                return await self._reach.ask(call)
            except BlobsUnavailable:
                if not later:
                    raise
        if not later:
            raise self._reach.unavailable("something waits for it on this node")
        with on_disk():
            await asyncio.to_thread(self._waiting.remove, what)
        self._reach.news.set()


def _not_removed(waiting: Waiting, page: list[BlobInfo]) -> list[BlobInfo]:
    return [info for info in page if not waiting.covering(info.key)]
