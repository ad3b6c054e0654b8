"""
Uploads the spool of a node when the store is available again.

Removals come first, then objects, then manifests, so that a manifest is in the store only when
everything put before it is. One process of the node uploads at a time. A kill at any point leaves
an object here, there or, identical, in both places. An object that the store refuses stays in the
spool and delays only manifests. What has waited longer than the time to live is dropped and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.blobs.base import PAGE_SIZE, PART_SIZE
from atoll.blobs.file_chunks import file_chunks
from atoll.blobs.spool_queue import is_create, on_disk
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta
    from typing import BinaryIO

    from atoll.blobs.availability import Availability
    from atoll.blobs.base import BlobInfo, Blobs
    from atoll.blobs.spool_queue import PendingRemoval, SpoolQueue
    from atoll.clock import Clock

log = structlog.get_logger(__name__)

IDLE_INTERVAL = 60.0
"""Seconds between two checks of an empty spool, and of expired entries."""
MAX_REFUSALS = 100
"""Refusals after which a pass ends: each has cost two requests."""
CONCURRENCY = 3
"""Objects that are uploaded at the same time."""
_FILE_TIME_STEP = 0.02
"""Seconds; longer than the resolution of file timestamps."""


class SpoolUploader:
    def __init__(
        self,
        remote: Blobs,
        queue: SpoolQueue,
        availability: Availability,
        clock: Clock,
        ttl: timedelta,
    ) -> None:
        self._remote = remote
        self._queue = queue
        self._availability = availability
        self._clock = clock
        self._ttl = ttl
        self._uploads = 0
        self._refused = 0

    async def run(self) -> None:
        await asyncio.to_thread(self._queue.recount)
        # Reports wrong credentials or a missing bucket at the start.
        await self._availability.probe()
        checked_at = self._clock.monotonic()
        while True:
            caught_up = False
            try:
                if self._clock.monotonic() - checked_at > IDLE_INTERVAL:
                    await self.drop_expired()
                    checked_at = self._clock.monotonic()
                if (
                    not (self._availability.suspect or self._availability.away)
                    or await self._availability.probe()
                ):
                    caught_up = await self.catch_up()
            except Exception as error:
                log.error("spool.failed", exc_info=error)
            if caught_up and self._availability.away is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_INTERVAL):
                        await self._availability.changed.wait()
                self._availability.changed.clear()
            else:
                await asyncio.sleep(self._availability.retry_after)

    async def catch_up(self) -> bool:
        """
        Upload the spool; true if it is empty then. False too while another process uploads it.
        """
        with on_disk():
            if not await asyncio.to_thread(self._any_waiting):
                return True
            with self._queue.upload_lock() as locked:
                if not locked or (
                    self._availability.away is not None and not await self._availability.probe()
                ):
                    return False
                idle = 0
                while idle < 2:
                    before = self._uploads
                    if not await self._pass():
                        return False
                    if not await asyncio.to_thread(self._any_waiting):
                        return True
                    if self._uploads == before:
                        # A manifest as new as the pass: file timestamps have a coarse resolution.
                        idle += 1
                        await asyncio.sleep(_FILE_TIME_STEP)
                return False

    async def drop_expired(self) -> None:
        """Drop entries that have waited longer than the time to live."""
        after: str | None = None
        with on_disk():
            while page := await asyncio.to_thread(self._queue.objects, "", after, PAGE_SIZE):
                for info in page:
                    if not self._is_expired(info.modified_at.timestamp()):
                        continue
                    file = await asyncio.to_thread(self._queue.open, info.key)
                    if file is not None:
                        with file:
                            if self._is_expired(os.fstat(file.fileno()).st_mtime):
                                log.error("spool.dropped", key=info.key, size=info.size)
                                await asyncio.to_thread(self._queue.forget_object, info.key, file)
                after = page[-1].key
            name = ""
            while removals := await asyncio.to_thread(self._queue.removals, name, PAGE_SIZE):
                for removal in removals:
                    if self._is_expired(removal.requested_at):
                        log.error("spool.dropped", removal=removal.what)
                        await asyncio.to_thread(self._queue.forget_removal, removal)
                name = removals[-1].name

    def _any_waiting(self) -> bool:
        return self._queue.any_removals() or self._queue.any_objects()

    async def _pass(self) -> bool:
        """Upload what is in the spool; false if some of it could not be uploaded."""
        # Whatever was put before a manifest is in the spool before the manifest gets its timestamp.
        began = await asyncio.to_thread(self._queue.file_time)
        self._refused = 0
        reuploaded = await self._apply_removals()
        if self._is_over() or not await self._upload_all(lambda info: not is_manifest(info.key)):
            return False
        uploaded = await self._upload_all(
            lambda info: is_manifest(info.key) and info.modified_at < began
        )
        return reuploaded and uploaded

    async def _apply_removals(self) -> bool:
        after, complete = "", True
        while removals := await asyncio.to_thread(self._queue.removals, after, PAGE_SIZE):
            for removal in removals:
                if not await self._try(removal.what, partial(self.apply, removal)):
                    complete = False
                    if self._is_over():
                        return False
                    continue
                await asyncio.to_thread(self._queue.forget_removal, removal)
            after = removals[-1].name
        return complete

    async def apply(self, removal: PendingRemoval) -> None:
        if removal.what.endswith("/"):
            await self._remote.remove_all(removal.what)
        else:
            await self._remote.remove(removal.what)

    async def _upload_all(self, chosen: Callable[[BlobInfo], bool]) -> bool:
        """Upload the chosen objects; false if one could not be uploaded."""
        after: str | None = None
        complete = True
        while page := await asyncio.to_thread(self._queue.objects, "", after, PAGE_SIZE):
            queue = [info for info in page if chosen(info)]
            for begin in range(0, len(queue), CONCURRENCY):
                some = queue[begin : begin + CONCURRENCY]
                # All of them end before this does: only the holder of the lock uploads.
                calls = (self._upload_one(info) for info in some)
                uploaded = await asyncio.gather(*calls, return_exceptions=True)
                for error in uploaded:
                    if isinstance(error, BaseException):
                        raise error
                complete = complete and all(uploaded)
                if self._is_over():
                    return False
            after = page[-1].key
        return complete

    def _is_over(self) -> bool:
        """Whether it is pointless to continue this pass."""
        return self._availability.away is not None or self._refused >= MAX_REFUSALS

    async def _upload_one(self, info: BlobInfo) -> bool:
        if await asyncio.to_thread(self._queue.removals_of, info.key):
            return False  # A removal that failed must come first.
        file = await asyncio.to_thread(self._queue.open, info.key)
        if file is None:
            return True
        with file:
            if not await self._try(info.key, lambda: self._upload(info.key, file)):
                return False
            await asyncio.to_thread(self._queue.forget_object, info.key, file)
            return True

    async def _upload(self, key: str, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        if is_create(file) or size <= PART_SIZE:
            data = await asyncio.to_thread(file.read)
            # An object that exists already stays.
            await (self._remote.create if is_create(file) else self._remote.put)(key, data)
        else:
            await self._remote.write(key, file_chunks(file, 0, size))

    async def _try(self, what: str, call_: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call_()
        except TemporaryError as error:
            # A refusal by a store that is otherwise available does not delay other objects.
            if await self._availability.probe():
                self._refused += 1
                if self._refused == 1:
                    log.error("spool.refused", what=what, error=error.message)
            return False
        self._uploads += 1
        self._availability.answered()
        return True

    def _is_expired(self, since: float) -> bool:
        return self._clock.now().timestamp() - since > self._ttl.total_seconds()


def is_manifest(key: str) -> bool:
    return "/manifests/" in key
