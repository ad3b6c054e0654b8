"""
The feed: all events of the database, in one order, for clients of any replica.

A client's stream reads events from the store a page at a time and only as fast as the client
receives them, so memory depends neither on the number of events nor on slow clients. Streams at the
same position share one read. A stream at the end waits until this or another replica reports new
events, and polls as well, because such a report can be lost.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, InvalidRequest, TemporaryError
from atoll.model.event import MAX_TYPE_LENGTH, MAX_TYPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.model.event import FeedPage
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

TOPIC = "events"
"""Published by a replica that has numbered events."""
POLL_SECONDS = 5.0
NUMBER_BATCH = 1000
"""Events numbered in one transaction."""
PAGE = 100
"""Events that one stream has in memory at most."""
CHECK_SECONDS = 30.0
"""How often a stream checks that its API key still exists."""
RETRY_SECONDS = 1.0
"""Pause while the database is unavailable."""
POSITION_SECONDS = 1.0
"""Shortest time between two reports of the position of a stream without events."""

_TYPE = re.compile(r"\*|[a-z][a-z_]*\.(?:\*|[a-z][a-z_]*)")

Query = tuple[int, tuple[str, ...], str | None, int]


def types_of(text: str | None) -> tuple[str, ...]:
    """The types in `session.*,execution.failed`; an empty tuple stands for all."""
    if text is None:
        return ()
    return checked_types(text.split(","))


def checked_types(types: list[str]) -> tuple[str, ...]:
    if len(types) > MAX_TYPES:
        raise InvalidRequest(f"types: at most {MAX_TYPES}.", field="types")
    for one in types:
        if len(one) > MAX_TYPE_LENGTH or _TYPE.fullmatch(one) is None:
            raise InvalidRequest(
                f"types: invalid event type {one[:MAX_TYPE_LENGTH]!r}. Use for example "
                "`session.stopped`, `session.*` or `*`.",
                field="types",
            )
    return tuple(dict.fromkeys(types))


class Feed:
    def __init__(self, store: Store, coordination: Coordination, clock: Clock) -> None:
        self._store = store
        self._coordination = coordination
        self._clock = clock
        self._changed = asyncio.Event()
        self._reads: dict[Query, asyncio.Task[FeedPage]] = {}
        self._closed = False
        self.unnumbered = asyncio.Event()
        """Set when this process has stored events that may not have a number yet."""

    def event_stored(self) -> None:
        """This process has stored an event, which has no number yet."""
        self.unnumbered.set()

    @property
    def changed(self) -> asyncio.Event:
        """Set when there may be events that did not exist when this property was read."""
        return self._changed

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End all streams: clients reconnect, possibly to another replica."""
        self._closed = True
        self.wake()

    async def number(self) -> int:
        """Number all events that have none, wake all streams, and return the count."""
        numbered = 0
        while count := await self._store.events.number(limit=NUMBER_BATCH):
            numbered += count
            self.wake()
        if numbered:
            try:
                await self._coordination.notify(TOPIC)
            except TemporaryError as error:
                log.info("events.not_published", error=error.message)
        return numbered

    async def end(self) -> int:
        """The position after all events that were stored before this call."""
        await self.number()
        return (await self._store.events.range()).last

    async def position(self, after: int | None) -> int:
        """`after` if it is valid; the position before the oldest event if it is null."""
        bounds = await self._store.events.range()
        if after is None:
            return bounds.first - 1
        if not bounds.first - 1 <= after <= bounds.last:
            raise _expired(after, bounds.first)
        return after

    async def read(
        self, after: int, types: tuple[str, ...] = (), subject: str | None = None, limit: int = PAGE
    ) -> FeedPage:
        """The next events, if there are any, and the position up to which the feed was read."""
        query = (after, types, subject, limit)
        reading = self._reads.get(query)
        if reading is None:
            work = self._store.events.after(after, types=types, subject=subject, limit=limit)
            reading = asyncio.create_task(work)
            self._reads[query] = reading
            reading.add_done_callback(lambda done: self._read_done(query, done))
        # Shielded because other streams may wait for it too.
        stretch = await asyncio.shield(reading)
        if stretch.first > after + 1:
            raise _expired(after, stretch.first)
        return stretch

    def _read_done(self, query: Query, reading: asyncio.Task[FeedPage]) -> None:
        del self._reads[query]
        if not reading.cancelled():
            reading.exception()  # Retrieved here, because all waiting streams may have ended.

    async def page(
        self,
        after: int | None,
        types: tuple[str, ...],
        subject: str | None,
        *,
        limit: int,
        wait: float,
    ) -> FeedPage:
        """
        The next events, including all that were stored before this call. If there are none, wait
        for some, at most `wait` seconds.
        """
        await self.number()
        position = await self.position(after)
        deadline = self._clock.monotonic() + wait
        while True:
            changed = self._changed
            stretch = await self.read(position, types, subject, limit)
            left = deadline - self._clock.monotonic()
            if stretch.events or self._closed:
                return stretch
            if stretch.through == position:
                if left <= 0:
                    return stretch
                await wait_for(changed, min(left, POLL_SECONDS))
            position = stretch.through

    async def follow(
        self,
        after: int,
        types: tuple[str, ...],
        subject: str | None,
        check: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[FeedPage]:
        """
        An endless stream. A stretch without events reports the position alone; the first one
        reports where the stream begins. `check` raises when the client may no longer read.
        """
        position, reported, reported_at = after, -1, float("-inf")
        checked_at = self._clock.monotonic()
        while not self._closed:
            changed = self._changed
            try:
                if self._clock.monotonic() - checked_at >= CHECK_SECONDS:
                    await check()
                    checked_at = self._clock.monotonic()
                stretch = await self.read(position, types, subject)
            except TemporaryError as error:
                log.info("events.not_read", error=error.message)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            now = self._clock.monotonic()
            due = stretch.through > reported and now - reported_at >= POSITION_SECONDS
            if stretch.events or due:
                yield stretch
                reported, reported_at = stretch.through, now
            if stretch.through == position:
                await wait_for(changed, POLL_SECONDS)
            position = stretch.through


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _expired(after: int, first: int) -> Conflict:
    return Conflict(
        f"Position {after} is not in the feed, which begins at {first}. Continue from there, or "
        "with new events (after=end), and read the current state of what you follow.",
        code="events_expired",
        first=first,
    )
