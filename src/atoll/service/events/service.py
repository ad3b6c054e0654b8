"""
The feed: what changed, in one order, for all who follow it on any replica.

Events are read from the store by whoever follows, a page at a time and as fast as he takes them, so
nothing here grows with their number or with a slow reader. Those at the same place who ask the same
at once share one read. Who has read all is woken when there may be more, here or on another
replica, and looks now and then as well, since a message can be lost.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, InvalidRequest, TemporaryError
from atoll.model.event import LONGEST_TYPE, MOST_TYPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.model.event import Stretch
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

TOPIC = "events"
"""What a replica tells the others when there is more on the feed."""
LOOK_SECONDS = 5.0
BATCH = 1000
"""Events numbered in one transaction."""
PAGE = 100
"""Events that one follower has in memory at most."""
CHECK_SECONDS = 30.0
"""How often it is asked whether one who follows still may."""
AWAY_SECONDS = 1.0
"""Pause while the database is away."""
MARK_SECONDS = 1.0
"""Shortest time between two words of how far a follower is who is told of no event."""

_TYPE = re.compile(r"\*|[a-z][a-z_]*\.(?:\*|[a-z][a-z_]*)")

Question = tuple[int, tuple[str, ...], str | None, int]


def types_of(text: str | None) -> tuple[str, ...]:
    """From `session.*,execution.failed`; none stands for all."""
    if text is None:
        return ()
    return checked_types(text.split(","))


def checked_types(types: list[str]) -> tuple[str, ...]:
    if len(types) > MOST_TYPES:
        raise InvalidRequest(f"types: at most {MOST_TYPES}.", field="types")
    for one in types:
        if len(one) > LONGEST_TYPE or _TYPE.fullmatch(one) is None:
            raise InvalidRequest(
                f"types: {one[:LONGEST_TYPE]!r} is no type of events; like `session.stopped`, "
                "`session.*` or `*`.",
                field="types",
            )
    return tuple(dict.fromkeys(types))


class Feed:
    def __init__(self, store: Store, coordination: Coordination, clock: Clock) -> None:
        self._store = store
        self._coordination = coordination
        self._clock = clock
        self._news = asyncio.Event()
        self._reads: dict[Question, asyncio.Task[Stretch]] = {}
        self._closed = False
        self.followers = 0
        self.unnumbered = asyncio.Event()
        """Set when events were stored here that may have no number yet."""

    def event_stored(self) -> None:
        """An event was committed, here, that has no number yet."""
        self.unnumbered.set()

    @property
    def news(self) -> asyncio.Event:
        """Set when there may be more than was there when this was asked for."""
        return self._news

    def wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """Let go of all who follow: they come back, to another replica perhaps."""
        self._closed = True
        self.wake()

    async def number(self) -> int:
        """Give a place to all that has none; how many. Those who follow are told, everywhere."""
        numbered = 0
        while count := await self._store.events.number(limit=BATCH):
            numbered += count
            self.wake()
        if numbered:
            try:
                await self._coordination.notify(TOPIC)
            except TemporaryError as error:
                log.info("events.not_told", error=error.message)
        return numbered

    async def end(self) -> int:
        """The place behind all that was stored before this was asked."""
        await self.number()
        return (await self._store.events.bounds()).last

    async def place(self, after: int | None) -> int:
        """Where to go on; before the oldest event that is kept when none is named."""
        bounds = await self._store.events.bounds()
        if after is None:
            return bounds.first - 1
        if not bounds.first - 1 <= after <= bounds.last:
            raise _gone(after, bounds.first)
        return after

    async def read(
        self, after: int, types: tuple[str, ...] = (), subject: str | None = None, limit: int = PAGE
    ) -> Stretch:
        """What comes next, or nothing, and how far was looked."""
        question = (after, types, subject, limit)
        reading = self._reads.get(question)
        if reading is None:
            work = self._store.events.after(after, types=types, subject=subject, limit=limit)
            reading = asyncio.create_task(work)
            self._reads[question] = reading
            reading.add_done_callback(lambda done: self._done(question, done))
        # Others may wait for it as well.
        stretch = await asyncio.shield(reading)
        if stretch.first > after + 1:
            raise _gone(after, stretch.first)
        return stretch

    def _done(self, question: Question, reading: asyncio.Task[Stretch]) -> None:
        del self._reads[question]
        if not reading.cancelled():
            reading.exception()  # For those who still wait, if there are any.

    async def page(
        self,
        after: int | None,
        types: tuple[str, ...],
        subject: str | None,
        *,
        limit: int,
        wait: float,
    ) -> Stretch:
        """
        The next events, all that were stored before included; when there are none, as soon as there
        are, or none after so many seconds.
        """
        await self.number()
        place = await self.place(after)
        deadline = self._clock.monotonic() + wait
        while True:
            news = self._news
            stretch = await self.read(place, types, subject, limit)
            left = deadline - self._clock.monotonic()
            if stretch.events or self._closed:
                return stretch
            if stretch.through == place:
                if left <= 0:
                    return stretch
                await until(news, min(left, LOOK_SECONDS))
            place = stretch.through

    async def follow(
        self,
        after: int,
        types: tuple[str, ...],
        subject: str | None,
        check: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[Stretch]:
        """
        Stretch by stretch, without end. One without events only says how far it is, first of all
        where it begins. `check` raises when he who follows may no longer.
        """
        place, told, told_at = after, -1, float("-inf")
        checked_at = self._clock.monotonic()
        self.followers += 1
        try:
            while not self._closed:
                news = self._news
                try:
                    if self._clock.monotonic() - checked_at >= CHECK_SECONDS:
                        await check()
                        checked_at = self._clock.monotonic()
                    stretch = await self.read(place, types, subject)
                except TemporaryError as error:
                    log.info("events.not_read", error=error.message)
                    await asyncio.sleep(AWAY_SECONDS)
                    continue
                now = self._clock.monotonic()
                due = stretch.through > told and now - told_at >= MARK_SECONDS
                if stretch.events or due:
                    yield stretch
                    told, told_at = stretch.through, now
                if stretch.through == place:
                    await until(news, LOOK_SECONDS)
                place = stretch.through
        finally:
            self.followers -= 1


async def until(event: asyncio.Event, seconds: float) -> None:
    """Wait for it, and for no longer."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _gone(after: int, first: int) -> Conflict:
    return Conflict(
        f"The feed has no place {after}: events are kept from {first} on. Begin there, or with "
        "what comes next (after=end), and look anew at what you follow.",
        code="events_expired",
        first=first,
    )
