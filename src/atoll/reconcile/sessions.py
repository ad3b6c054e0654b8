"""
Brings the sessions of this node to their wanted state, and fires their timers.

Notifications (a session was assigned to this node, or its wanted state changed) are hints; the
sweeps are the truth. A sweep reads only sessions that are due, so stopped sessions cost nothing.
One worker of all replicas handles a session at a time; one that does not get the lease skips it.
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
RETRY_DELAY = 1.0
"""Seconds after which a session that another replica was handling is checked again."""


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
            return RETRY_DELAY
        self._timers.schedule(session)
        return None

    def settling_delayed(self, session_id: str, seconds: float) -> None:
        self.queue.add(session_id, after=seconds)

    async def once(self) -> None:
        """Queue the sessions that are not in their wanted state."""
        for session in await self._store.sessions.unsettled(
            self._clock.now(), node_id=self._node_id, limit=self._settings.sweep_batch
        ):
            self.queue.add(session.id)

    async def timers(self) -> None:
        """
        Record what timers demand (stop, archive, delete), a batch at a time. The queue does the
        work, because an archive may take hours.
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
