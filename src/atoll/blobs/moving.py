"""
How what waits on a node gets to the store, when that is back.

Removals first, then objects, then manifests, so that a manifest is in the store only when all that
was put before it is. One process of the node at a time does it. A kill at any point leaves an
object here, there or, equal, in both places. One that the store refuses stays, and does not hold up
the others, except manifests. What has waited for too long is dropped, with a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.blobs.base import PAGE, PART
from atoll.blobs.pieces import pieces_of
from atoll.blobs.waiting import on_disk, only_new
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo, Blobs
    from atoll.blobs.reach import Reach
    from atoll.blobs.waiting import Removal, Waiting
    from atoll.clock import Clock

log = structlog.get_logger(__name__)

IDLE_SECONDS = 60.0
"""Between two looks at a spool in which nothing should wait, and for what is too old."""
REFUSALS = 100
"""So many end a pass: each has cost the store two requests for nothing."""
AT_ONCE = 3
"""Objects that are uploaded at the same time."""
_TICK = 0.02
"""Seconds; longer than the steps in which the kernel dates files."""


class Moving:
    def __init__(
        self, remote: Blobs, waiting: Waiting, reach: Reach, clock: Clock, ttl: timedelta
    ) -> None:
        self._remote = remote
        self._waiting = waiting
        self._reach = reach
        self._clock = clock
        self._ttl = ttl
        self._moves = 0
        self._refused = 0

    async def run(self) -> None:
        await asyncio.to_thread(self._waiting.recount)
        # So that wrong credentials or a missing bucket are told of at the start.
        await self._reach.probe()
        looked = self._clock.monotonic()
        while True:
            done = False
            try:
                if self._clock.monotonic() - looked > IDLE_SECONDS:
                    await self.drop_old()
                    looked = self._clock.monotonic()
                if not (self._reach.suspect or self._reach.away) or await self._reach.probe():
                    done = await self.catch_up()
            except Exception as error:
                log.error("spool.failed", exc_info=error)
            if done and self._reach.away is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._reach.news.wait()
                self._reach.news.clear()
            else:
                await asyncio.sleep(self._reach.retry_after)

    async def catch_up(self) -> bool:
        """
        Move to the store what waits; whether nothing does any more. False too while another
        process is at it.
        """
        with on_disk():
            if not await asyncio.to_thread(self._anything):
                return True
            with self._waiting.turn() as mine:
                if not mine or (self._reach.away is not None and not await self._reach.probe()):
                    return False
                idle = 0
                while idle < 2:
                    before = self._moves
                    if not await self._pass():
                        return False
                    if not await asyncio.to_thread(self._anything):
                        return True
                    if self._moves == before:
                        # A manifest as young as the pass; by files' clock time goes in leaps.
                        idle += 1
                        await asyncio.sleep(_TICK)
                return False

    async def drop_old(self) -> None:
        """Drop what has waited for too long."""
        after: str | None = None
        with on_disk():
            while page := await asyncio.to_thread(self._waiting.objects, "", after, PAGE):
                for info in page:
                    if not self._is_old(info.modified_at.timestamp()):
                        continue
                    file = await asyncio.to_thread(self._waiting.open, info.key)
                    if file is not None:
                        with file:
                            if self._is_old(os.fstat(file.fileno()).st_mtime):
                                log.error("spool.dropped", key=info.key, size=info.size)
                                await asyncio.to_thread(self._waiting.uploaded, info.key, file)
                after = page[-1].key
            name = ""
            while removals := await asyncio.to_thread(self._waiting.removals, name, PAGE):
                for removal in removals:
                    if self._is_old(removal.age_from):
                        log.error("spool.dropped", removal=removal.what)
                        await asyncio.to_thread(self._waiting.done, removal)
                name = removals[-1].name

    def _anything(self) -> bool:
        return self._waiting.any_removals() or self._waiting.any_objects()

    async def _pass(self) -> bool:
        """Move what is there; False when some of it could not be moved."""
        # What is put before a manifest is there before the manifest is dated.
        began = await asyncio.to_thread(self._waiting.tick)
        self._refused = 0
        removed = await self._move_removals()
        if self._is_over() or not await self._move(lambda info: not is_manifest(info.key)):
            return False
        moved = await self._move(lambda info: is_manifest(info.key) and info.modified_at < began)
        return removed and moved

    async def _move_removals(self) -> bool:
        after, whole = "", True
        while removals := await asyncio.to_thread(self._waiting.removals, after, PAGE):
            for removal in removals:
                if not await self._moved(removal.what, partial(self.apply, removal)):
                    whole = False
                    if self._is_over():
                        return False
                    continue
                await asyncio.to_thread(self._waiting.done, removal)
            after = removals[-1].name
        return whole

    async def apply(self, removal: Removal) -> None:
        if removal.what.endswith("/"):
            await self._remote.remove_all(removal.what)
        else:
            await self._remote.remove(removal.what)

    async def _move(self, chosen: Callable[[BlobInfo], bool]) -> bool:
        """Upload the chosen ones; False when one could not be."""
        after: str | None = None
        whole = True
        while page := await asyncio.to_thread(self._waiting.objects, "", after, PAGE):
            queue = [info for info in page if chosen(info)]
            for begin in range(0, len(queue), AT_ONCE):
                some = queue[begin : begin + AT_ONCE]
                # All of them end before this does: who has the turn is the only one who moves.
                calls = (self._move_one(info) for info in some)
                moved = await asyncio.gather(*calls, return_exceptions=True)
                for error in moved:
                    if isinstance(error, BaseException):
                        raise error
                whole = whole and all(moved)
                if self._is_over():
                    return False
            after = page[-1].key
        return whole

    def _is_over(self) -> bool:
        """Whether there is no use in going on with this pass."""
        return self._reach.away is not None or self._refused >= REFUSALS

    async def _move_one(self, info: BlobInfo) -> bool:
        if await asyncio.to_thread(self._waiting.covering, info.key):
            return False  # A removal that could not be done has to come first.
        file = await asyncio.to_thread(self._waiting.open, info.key)
        if file is None:
            return True
        with file:
            if not await self._moved(info.key, lambda: self._upload(info.key, file)):
                return False
            await asyncio.to_thread(self._waiting.uploaded, info.key, file)
            return True

    async def _upload(self, key: str, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        if only_new(file) or size <= PART:
            data = await asyncio.to_thread(file.read)
            # Whoever was there first stays.
            await (self._remote.create if only_new(file) else self._remote.put)(key, data)
        else:
            await self._remote.write(key, pieces_of(file, 0, size))

    async def _moved(self, what: str, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except TemporaryError as error:
            # One that is refused by a store that else works does not hold up the others.
            if await self._reach.probe():
                self._refused += 1
                if self._refused == 1:
                    log.error("spool.refused", what=what, error=error.message)
            return False
        self._moves += 1
        self._reach.answered()
        return True

    def _is_old(self, since: float) -> bool:
        return self._clock.now().timestamp() - since > self._ttl.total_seconds()


def is_manifest(key: str) -> bool:
    return "/manifests/" in key
