"""
Records when sessions with an idle timeout were last used.

A use is written soon after the first request and then at most ten times per idle timeout, so a busy
session costs next to nothing. Every replica knows the last use to a tenth of the idle timeout.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from atoll.model.session import Session
    from atoll.service.replica import Replica
    from atoll.service.sessions.observers import SessionObservers

log = structlog.get_logger(__name__)

WRITES_PER_TIMEOUT = 10
MAX_ATTEMPTS = 5
"""Attempts to write to a session that others write at the same time."""
MAX_REMEMBERED = 10_000
"""Sessions whose last write is remembered; one beyond that is written once too often."""


class Activity(SessionObserver):
    def __init__(self, replica: Replica, observers: SessionObservers) -> None:
        self._replica = replica
        self._clock = replica.clock
        self._observers = observers
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._written: OrderedDict[str, float] = OrderedDict()
        """When each session's use was last written, least recent first."""
        observers.subscribe(self)

    def session_used(self, session: Session) -> None:
        idle_timeout = session.idle_timeout
        if idle_timeout is None or session.id in self._due:
            return
        now = self._clock.monotonic()
        since = now - self._written.get(session.id, float("-inf"))
        delay = max(0.0, idle_timeout / WRITES_PER_TIMEOUT - since)
        loop = asyncio.get_running_loop()
        self._due[session.id] = loop.call_later(delay, self._start, session.id)

    def _start(self, session_id: str) -> None:
        self._replica.background.start(self._write(session_id), f"write use of {session_id}")

    async def _write(self, session_id: str) -> None:
        # Before the first await: a use that comes from now on is written the next time.
        self._due.pop(session_id, None)
        self._written[session_id] = self._clock.monotonic()
        self._written.move_to_end(session_id)
        if len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)
        sessions = self._replica.store.sessions
        try:
            for _ in range(MAX_ATTEMPTS):
                session = await sessions.get(session_id)
                if session is None or session.status.ended:
                    self._written.pop(session_id, None)
                    return
                now = self._clock.now()
                if await sessions.touch(session, now):
                    self._observers.session_changed(dataclasses.replace(session, active_at=now))
                    return
        except TemporaryError as error:
            self._written.pop(session_id, None)
            log.info("activity.not_written", session_id=session_id, error=error.message)

    def close(self) -> None:
        for timer in self._due.values():
            timer.cancel()
