"""
Places on the feed for what was stored, word of it from other replicas, and the end of what is old.

The replica that stored an event numbers it, at once when it is alone and with others when there are
many: at most ten times a second, so that the writes of a busy server hardly become more. What a
replica that died has left is found by the next look of any other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.reconcile.sweep import sweep
from atoll.service.events.service import TOPIC, wait_for

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.service.events.service import Feed
    from atoll.settings import EventSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

POLL_SECONDS = 2.0
TOGETHER_SECONDS = 0.1
"""What comes in this time after some were numbered is numbered together."""
AGAIN_SECONDS = 1.0
HEAR_SECONDS = 60.0
BATCH = 500
"""Events forgotten in one transaction."""

SWEEP_INTERVAL = 60.0
"""Seconds between two sweeps."""


class EventNumbering:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def run(self) -> None:
        while True:
            await wait_for(self._feed.unnumbered, POLL_SECONDS)
            self._feed.unnumbered.clear()
            pause = TOGETHER_SECONDS
            try:
                await self._feed.number()
            except Exception as error:
                known = isinstance(error, TemporaryError)
                log.warning(
                    "events.not_numbered", error=str(error), exc_info=None if known else error
                )
                pause = AGAIN_SECONDS
            await asyncio.sleep(pause)


class EventNotifications:
    """Wakes those who follow here when another replica has more."""

    def __init__(self, coordination: Coordination, feed: Feed) -> None:
        self._coordination = coordination
        self._feed = feed

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(TOPIC) as heard:
                    while True:
                        if await heard.wait(HEAR_SECONDS):
                            self._feed.wake()
            except Exception as error:
                known = isinstance(error, TemporaryError)
                log.warning("events.not_heard", error=str(error), exc_info=None if known else error)
                await asyncio.sleep(AGAIN_SECONDS)


class EventSweep:
    def __init__(self, store: Store, clock: Clock, settings: EventSettings) -> None:
        self._store = store
        self._clock = clock
        self._keep = settings.keep

    async def run(self) -> None:
        await sweep("event_sweep.failed", SWEEP_INTERVAL, self.once)

    async def once(self) -> None:
        """Forget all that was kept long enough. Any replica may do it, several at once too."""
        before = self._clock.now() - self._keep
        while await self._store.events.expire(before, limit=BATCH) == BATCH:
            pass
