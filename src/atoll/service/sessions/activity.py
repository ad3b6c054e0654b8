"""
When something was last asked of sessions that are stopped when nobody needs them.

Written down soon after the first request and then at most ten times in the time after which a
session counts as idle, so a busy session costs next to nothing, and one that is asked for at
another replica is known to be active here to a tenth of that time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.model.session import Session
    from atoll.service.background import BackgroundTasks
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

PARTS = 10
TRIES = 5
"""For a session that others write at the same time."""
REMEMBERED = 10_000
"""Sessions of which it is known when that was; one beyond is written down once too often."""


class Activity:
    def __init__(self, store: Store, background: BackgroundTasks, clock: Clock) -> None:
        self._store = store
        self._background = background
        self._clock = clock
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._written: OrderedDict[str, float] = OrderedDict()
        """When each was last written down here; of the last ones."""
        self.moved: Callable[[Session], None] = lambda session: None
        """Told of a session whose timer runs out later than it would have."""

    def touch(self, session: Session) -> None:
        idle = session.idle_timeout
        if idle is None or session.id in self._due:
            return
        now = self._clock.monotonic()
        since = now - self._written.get(session.id, float("-inf"))
        delay = max(0.0, idle / PARTS - since)
        loop = asyncio.get_running_loop()
        self._due[session.id] = loop.call_later(delay, self._start, session.id)

    def _start(self, session_id: str) -> None:
        self._background.start(self._write(session_id), f"note activity of {session_id}")

    async def _write(self, session_id: str) -> None:
        # Before the first await: who asks for it from now on is noted the next time.
        self._due.pop(session_id, None)
        self._written[session_id] = self._clock.monotonic()
        self._written.move_to_end(session_id)
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        try:
            for _ in range(TRIES):
                session = await self._store.sessions.get(session_id)
                if session is None or session.status.ended:
                    self._written.pop(session_id, None)
                    return
                if await self._store.sessions.seen(session, self._clock.now()):
                    self.moved(session)
                    return
        except TemporaryError as error:
            self._written.pop(session_id, None)
            log.info("activity.not_noted", session_id=session_id, error=error.message)

    def close(self) -> None:
        for timer in self._due.values():
            timer.cancel()
