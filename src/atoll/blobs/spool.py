"""
Blobs of a store that may be away, with what has to wait for it on this node's disk.

It keeps the contract of blobs. While the store is away, what is put beneath the given prefixes
waits here and is read from here, by this node alone; other keys are unavailable, to put and to
read. Removals wait too, whatever their key. A list needs the store: half of one would mislead.
After a failure the store is not asked again for `retry_after`, so that not every call waits for a
time-out; then one call tries it.

As long as something waits for a key, all calls on that key keep to the spool, and `catch_up` alone
moves it: removals first, then objects, then manifests (`…/manifests/…`), so that a manifest is in
the store only when all that was put before it is. One process at a time catches up; a kill at any
point leaves an object here, there or, equal, in both places.

What waits is bounded in size (`TemporaryError`, `spool_full`, beyond that) and in time: what could
not be moved for `spool_ttl` is dropped, with a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, TypeVar

import structlog

from atoll.blobs import tree
from atoll.blobs.base import (
    PAGE,
    PART,
    PIECE,
    Opened,
    Refused,
    check_expiry,
    check_key,
    check_page,
    check_prefix,
)
from atoll.blobs.waiting import Held, Waiting, on_disk, only_new
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from datetime import timedelta
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo, Blobs, Method
    from atoll.blobs.waiting import Draft, Removal, Used
    from atoll.clock import Clock
    from atoll.settings import BlobSettings

T = TypeVar("T")
log = structlog.get_logger(__name__)

UNAVAILABLE = "blobs_unavailable"
IDLE_SECONDS = 60.0
"""Between two looks at a spool in which nothing should wait."""
_TICK = 0.02
"""Seconds; longer than the steps in which the kernel dates files."""
REFUSALS = 100
"""So many end a pass: each has cost the store two requests for nothing."""
AT_ONCE = 3
"""Objects that are uploaded at the same time."""


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
        self._waiting = Waiting(directory, settings.spool_size)
        self._clock = clock
        self._prefixes = prefixes
        self._probed = prefixes[0]
        self._ttl = settings.spool_ttl
        self._retry_after = settings.retry_after.total_seconds()
        # As long as one call at a store that does not answer can take.
        self._trial = 2 * settings.timeout.total_seconds()
        self._reason: str | None = None
        self._until = 0.0
        self._moves = 0
        self._suspect = False
        self._refused = 0
        self._news = asyncio.Event()

    @property
    def away(self) -> str | None:
        """Why the store failed last, until it answers again; None when it is there."""
        return self._reason

    @property
    def waiting(self) -> Used:
        """How much waits, for all processes on this node."""
        return self._waiting.used()

    # The contract of blobs

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        if await self._past_spool(key):
            try:
                return await self._ask(lambda: self._remote.put(key, data))
            except TemporaryError as error:
                self._reraise_unless_kept(key, error)
        await self._keep(key, data, only_new=False)

    async def create(self, key: str, data: bytes) -> bool:
        """While the store is away, "no object has the key" is as far as this node knows."""
        check_key(key)
        if await self._past_spool(key):
            try:
                return await self._ask(lambda: self._remote.create(key, data))
            except TemporaryError as error:
                self._reraise_unless_kept(key, error)
        return await self._keep(key, data, only_new=True)

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """What goes to the store is written to the disk as well: chunks come only once."""
        check_key(key)
        direct = await self._past_spool(key)
        if not self._is_kept(key):
            return await self._ask(lambda: self._remote.write(key, chunks))
        with on_disk():
            draft = await asyncio.to_thread(self._waiting.draft)
        try:
            return await self._write(key, chunks, draft, direct)
        finally:
            await asyncio.to_thread(draft.drop)

    async def get(self, key: str, *, start: int = 0, end: int | None = None) -> bytes | None:
        check_key(key)

        def read() -> tuple[Held, bytes | None]:
            file = self._waiting.open(key)
            if file is None:
                return self._waiting.look(key), None
            with file:
                file.seek(start)
                return Held.OBJECT, file.read(-1 if end is None else max(0, end - start))

        with on_disk():
            held, data = await asyncio.to_thread(read)
        if data is not None or held is Held.REMOVED:
            return data
        return await self._ask(lambda: self._remote.get(key, start=start, end=end))

    async def head(self, key: str) -> BlobInfo | None:
        opened = await self._open(key)
        if isinstance(opened, Held):
            if opened is Held.REMOVED:
                return None
            return await self._ask(lambda: self._remote.head(key))
        info, file = opened
        file.close()
        return info

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> Opened | None:
        opened = await self._open(key)
        if isinstance(opened, Held):
            if opened is Held.REMOVED:
                return None
            return await self._ask(lambda: self._remote.open(key, start=start, end=end))
        info, file = opened
        stop = info.size if end is None else min(end, info.size)
        return Opened(info, _pieces(_Descriptor(file), start, stop))

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
            last = reached
            page = await self._ask(
                lambda last=last: self._remote.list(prefix, after=last, limit=limit)  # type: ignore[misc]
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

    async def remove(self, key: str) -> None:
        check_key(key)
        with on_disk():
            held = await asyncio.to_thread(self._waiting.look, key)
        await self._remove(key, held, lambda: self._remote.remove(key))

    async def remove_all(self, prefix: str) -> None:
        directory = check_prefix(prefix)

        def held() -> Held:
            beneath = self._waiting.objects(directory, None, 1)
            return Held.OBJECT if beneath else self._waiting.look(f"{prefix}any")

        with on_disk():
            found = await asyncio.to_thread(held)
        await self._remove(prefix, found, lambda: self._remote.remove_all(prefix))

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        """None as well while the store could not serve it, or has not yet what waits here."""
        check_key(key)
        check_expiry(expires)
        if self._reason is not None:
            return None
        with on_disk():
            if await asyncio.to_thread(self._waiting.look, key) is not Held.NOTHING:
                return None
        return await self._remote.presign(method, key, expires)

    # Catching up

    async def run(self) -> None:
        await asyncio.to_thread(self._waiting.recount)
        # So that wrong credentials or a missing bucket are told of at the start.
        await self._probe()
        looked = self._clock.monotonic()
        while True:
            done = False
            try:
                if self._clock.monotonic() - looked > IDLE_SECONDS:
                    await self.drop_old()
                    looked = self._clock.monotonic()
                if not (self._suspect or self._reason) or await self._probe():
                    done = await self.catch_up()
            except Exception as error:
                log.error("spool.failed", exc_info=error)
            if done and self._reason is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._news.wait()
                self._news.clear()
            else:
                await asyncio.sleep(self._retry_after)

    async def catch_up(self) -> bool:
        """
        Move to the store what waits; whether nothing does any more. False too while another
        process is at it.
        """
        with on_disk():
            if not await asyncio.to_thread(self._anything):
                return True
            with self._waiting.turn() as mine:
                if not mine:
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
        if not await self._move_removals():
            return False
        if not await self._move(lambda info: not _is_manifest(info.key)):
            return False
        return await self._move(lambda info: _is_manifest(info.key) and info.modified_at < began)

    async def _move_removals(self) -> bool:
        after, whole = "", True
        while removals := await asyncio.to_thread(self._waiting.removals, after, PAGE):
            for removal in removals:
                if not await self._moved(removal.what, lambda r=removal: self._apply(r)):  # type: ignore[misc]
                    whole = False
                    if self._is_over():
                        return False
                    continue
                await asyncio.to_thread(self._waiting.done, removal)
            after = removals[-1].name
        return whole

    async def _apply(self, removal: Removal) -> None:
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
                moved = await asyncio.gather(*(self._move_one(info) for info in some))
                whole = whole and all(moved)
                if self._is_over():
                    return False
            after = page[-1].key
        return whole

    def _is_over(self) -> bool:
        """Whether there is no use in going on with this pass."""
        return self._reason is not None or self._refused >= REFUSALS

    async def _move_one(self, info: BlobInfo) -> bool:
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
            copy = os.fdopen(os.dup(file.fileno()), "rb")
            await self._remote.write(key, _pieces(_Descriptor(copy), 0, size))

    async def _moved(self, what: str, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except TemporaryError as error:
            # One that is refused by a store that else works does not hold up the others.
            if await self._probe():
                self._refused += 1
                if self._refused == 1:
                    log.error("spool.refused", what=what, error=error.message)
            return False
        self._moves += 1
        self._answered()
        return True

    async def _probe(self) -> bool:
        self._suspect = False
        try:
            await self._remote.list(self._probed, limit=1)
        except TemporaryError as error:
            self._failed(error)
            return False
        self._answered()
        return True

    # What waits, and what does not

    def _is_kept(self, key: str) -> bool:
        return key.startswith(self._prefixes)

    def _is_old(self, since: float) -> bool:
        return self._clock.now().timestamp() - since > self._ttl.total_seconds()

    def _reraise_unless_kept(self, key: str, error: TemporaryError) -> None:
        if error.code != UNAVAILABLE or not self._is_kept(key):
            raise error

    async def _past_spool(self, key: str) -> bool:
        """Whether a new object may go to the store itself; else it has to wait here."""
        kept = self._is_kept(key)

        def look() -> tuple[Held, list[Removal], bool]:
            held, removals = self._waiting.look(key), self._waiting.covering(key)
            behind = kept and _is_manifest(key) and self._waiting.any_objects()
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
                    raise self._unavailable("a removal is under way")
                for removal in removals:
                    await self._ask(lambda r=removal: self._apply(r))  # type: ignore[misc]
                    await asyncio.to_thread(self._waiting.done, removal)
        return True

    async def _keep(self, key: str, data: bytes, *, only_new: bool) -> bool:
        with on_disk():
            kept = await asyncio.to_thread(self._waiting.put, key, data, only_new=only_new)
        self._news.set()
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
                    return await self._ask(lambda: self._remote.write(key, copied))
                except TemporaryError as error:
                    if at_source or error.code != UNAVAILABLE:
                        raise
        async with contextlib.aclosing(noted()) as rest:
            async for _ in rest:
                if full is not None:
                    raise full
        if full is not None:
            raise full
        with on_disk():
            await asyncio.to_thread(draft.commit, key)
        self._news.set()
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

    async def _remove(self, what: str, held: Held, call: Callable[[], Awaitable[None]]) -> None:
        if held is Held.NOTHING:
            try:
                return await self._ask(call)
            except TemporaryError as error:
                if error.code != UNAVAILABLE:
                    raise
        with on_disk():
            await asyncio.to_thread(self._waiting.remove, what)
        self._news.set()

    # Whether the store is away

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        now = self._clock.monotonic()
        if self._reason is not None:
            if now < self._until:
                raise self._unavailable(self._reason)
            # This one tries; the others go on not to wait.
            self._until = now + self._trial
        try:
            result = await call()
        except TemporaryError as error:
            if error.code == UNAVAILABLE and not isinstance(error, Refused):
                self._failed(error)
            else:
                # It answers. Whether it does so to others is for the loop to find out.
                self._until = self._clock.monotonic()
                self._suspect = self._suspect or isinstance(error, Refused)
                self._news.set()
            raise
        except BaseException:
            self._until = self._clock.monotonic()
            raise
        self._answered()
        return result

    def _unavailable(self, why: str) -> TemporaryError:
        return TemporaryError(
            f"The blob store is away: {why}", code=UNAVAILABLE, retry_after=self._retry_after
        )

    def _failed(self, error: TemporaryError) -> None:
        if self._reason is None:
            log.warning("blobs.away", error=error.message)
            self._news.set()
        self._reason = error.message
        self._until = self._clock.monotonic() + self._retry_after

    def _answered(self) -> None:
        if self._reason is not None:
            log.info("blobs.back")
            self._news.set()
        self._reason = None


def _not_removed(waiting: Waiting, page: list[BlobInfo]) -> list[BlobInfo]:
    return [info for info in page if not waiting.covering(info.key)]


def _is_manifest(key: str) -> bool:
    return "/manifests/" in key


class _Descriptor:
    """An open file that is closed with the last who knows it, however that one ends."""

    def __init__(self, file: BinaryIO) -> None:
        with file:
            self._number = os.dup(file.fileno())

    def read(self, size: int, at: int) -> bytes:
        return os.pread(self._number, size, at)

    def __del__(self) -> None:
        os.close(self._number)


async def _pieces(file: _Descriptor, start: int, stop: int) -> AsyncIterator[bytes]:
    for begin in range(start, stop, PIECE):
        yield await asyncio.to_thread(file.read, min(PIECE, stop - begin), begin)
