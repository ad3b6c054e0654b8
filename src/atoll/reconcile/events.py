"""
Numbers new events, and expires old ones.

The replica that stored an event numbers it, at most ten times a second and then many at once, so
that a busy server writes little more. Any replica numbers what a dead one left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.reconcile.sweep import sweep
from atoll.service.events.service import wait_for

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.service.events.service import Feed
    from atoll.settings import EventSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

POLL_INTERVAL = 2.0
BATCH_INTERVAL = 0.1
"""Seconds between two batches of numbers."""
RETRY_DELAY = 1.0
BATCH = 500
"""Events deleted in one transaction."""

SWEEP_INTERVAL = 60.0
"""Seconds between two sweeps."""


class EventNumbering:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def run(self) -> None:
        while True:
            await wait_for(self._feed.unnumbered, POLL_INTERVAL)
            self._feed.unnumbered.clear()
            pause = BATCH_INTERVAL
            try:
                await self._feed.number()
            except Exception as error:
                known = isinstance(error, TemporaryError)
                log.warning(
                    "events.not_numbered", error=str(error), exc_info=None if known else error
                )
                pause = RETRY_DELAY
            await asyncio.sleep(pause)


class EventSweep:
    def __init__(self, store: Store, clock: Clock, settings: EventSettings) -> None:
        self._store = store
        self._clock = clock
        self._keep = settings.keep

    async def run(self) -> None:
        await sweep("event_sweep.failed", SWEEP_INTERVAL, self.once)

    async def once(self) -> None:
        """Delete expired events. Several replicas may do so at the same time."""
        before = self._clock.now() - self._keep
        while await self._store.events.expire(before, limit=BATCH) == BATCH:
            pass
