"""
Sessions of this node are brought to what is wanted of them, and their timers are kept.

What is told (a session was given to this node, or came to want something) is a hint; the sweeps are
the truth. The store is asked only for what is due, so sessions at rest cost nothing. A session is
seen to by one worker at a time, of whichever replica: who does not get its lease leaves it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.reconcile.loop import work
from atoll.reconcile.queue import Queue
from atoll.reconcile.sweep import sweep, sweep_on_notify
from atoll.service.sessions.observers import SessionObserver
from atoll.service.sessions.records import settle_topic

if TYPE_CHECKING:
    from atoll.service.replica import Replica
    from atoll.service.sessions.observers import SessionObservers
    from atoll.service.sessions.timers import SessionTimers
    from atoll.service.sessions.transitions import Transitions
    from atoll.settings import SessionSettings

log = structlog.get_logger(__name__)

WORKERS = 8
AGAIN = 1.0
"""Seconds after which a session that another replica was seeing to is looked at again."""


class SessionReconciler(SessionObserver):
    def __init__(
        self,
        replica: Replica,
        timers: SessionTimers,
        transitions: Transitions,
        observers: SessionObservers,
        settings: SessionSettings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._timers = timers
        self._transitions = transitions
        self._settings = settings
        observers.subscribe(self)
        self.queue = Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(work(self.queue, self.settle, workers=WORKERS))
            group.create_task(
                sweep_on_notify(
                    "sweep.failed",
                    self._coordination,
                    settle_topic(self._node_id),
                    self._settings.sweep.total_seconds(),
                    self.once,
                )
            )
            group.create_task(
                sweep("timers.failed", self._settings.timer_sweep.total_seconds(), self.timers)
            )

    async def settle(self, session_id: str) -> float | None:
        session = await self._transitions.settle(session_id, wait=False)
        if session is None:
            return AGAIN
        self._timers.schedule(session)
        return None

    def settling_delayed(self, session_id: str, seconds: float) -> None:
        self.queue.add(session_id, after=seconds)

    async def once(self) -> None:
        """Put those in the queue that are not what is wanted."""
        for session in await self._store.sessions.unsettled(
            self._clock.now(), node_id=self._node_id, limit=self._settings.sweep_batch
        ):
            self.queue.add(session.id)

    async def timers(self) -> None:
        """
        Want what is due by itself, some at a time, until nothing is. What that takes, an archive
        may take hours, is for the queue.
        """
        limit = self._settings.timer_batch
        while True:
            found = await self._store.sessions.timed_out(
                self._clock.now(), node_id=self._node_id, limit=limit
            )
            done = await asyncio.gather(
                *(self._timers.fire(session.id) for session in found), return_exceptions=True
            )
            for session, result in zip(found, done, strict=True):
                if isinstance(result, Exception):
                    log.warning("timer.failed", session_id=session.id, exc_info=result)
                elif isinstance(result, BaseException):
                    raise result
                elif result:
                    self.queue.add(session.id)
            if len(found) < limit or any(isinstance(result, Exception) for result in done):
                return
