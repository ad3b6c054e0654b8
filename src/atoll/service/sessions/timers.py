"""
Timers of sessions: the end of their lifetime, idle stop, archive and removal.

Timers of the sessions that this replica has written or connected to last are kept in memory, so
that they fire in time; the sweep in `reconcile/sessions.py` finds those of lost replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import SessionEnded, VersionConflict
from atoll.model import plan
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.transitions import Transitions
    from atoll.service.sessions.wanted_state import WantedStates

MAX_DELAY = 86_400.0
"""Seconds beyond which a timer is left to the sweep."""


class SessionTimers(SessionObserver):
    def __init__(
        self,
        core: SessionCore,
        wanted_states: WantedStates,
        transitions: Transitions,
    ) -> None:
        self._replica = core.replica
        self._clock = core.replica.clock
        self._records = core.records
        self._wanted_states = wanted_states
        self._transitions = transitions
        self._timers: dict[str, asyncio.TimerHandle] = {}
        core.observers.subscribe(self)

    def session_changed(self, session: Session) -> None:
        self.schedule(session)

    def session_ended(self, session: Session) -> None:
        self.schedule(session)

    def schedule(self, session: Session) -> None:
        """Replace the session's timer by the one that its record asks for."""
        previous = self._timers.pop(session.id, None)
        if previous is not None:
            previous.cancel()
        at = plan.timer_at(session)
        left = MAX_DELAY if at is None else (at - self._clock.now()).total_seconds()
        if left < MAX_DELAY:
            self._timers[session.id] = asyncio.get_running_loop().call_later(
                max(0.0, left), self._start, session.id
            )

    def _start(self, session_id: str) -> None:
        self._timers.pop(session_id, None)
        self._replica.background.start(self._expired(session_id), f"timer of {session_id}")

    async def _expired(self, session_id: str) -> None:
        if await self.fire(session_id):
            settled = await self._transitions.settle(session_id)
            if settled is not None:
                self.schedule(settled)

    async def fire(self, session_id: str) -> bool:
        """Act on the session's timer, if it has expired; whether the session has to be settled."""
        while True:
            session = await self._records.get(session_id)
            if not self._records.is_here(session):
                return False
            try:
                return await self._fire(session)
            except (VersionConflict, SessionEnded):
                continue  # It changed meanwhile, and may have been given more time.

    async def _fire(self, session: Session) -> bool:
        now, timer = self._clock.now(), plan.timer(session)
        at = plan.timer_at(session)
        if at is None or at > now:
            # The clock went back, or the session was given more time.
            self.schedule(session)
        elif session.rested_at is None and (timer is None or timer.cause is Cause.TIMEOUT):
            await self._records.end(session, SessionStatus.TIMEOUT, Cause.TIMEOUT)
        elif timer is None or timer.wanted is Wanted.DESTROYED:
            await self._records.end(session, SessionStatus.TERMINATED, Cause.IDLE)
        elif timer.wanted is Wanted.STOPPED and await self._wanted_states.is_busy(session.id):
            await self._replica.store.sessions.touch(session, now)
            self.schedule(dataclasses.replace(session, active_at=now))
        else:
            await self._wanted_states.want(session.id, timer.wanted, timer.cause, of=session)
            if timer.wanted is Wanted.STOPPED and await self._wanted_states.is_busy(session.id):
                # The execution was accepted after the first look; later ones start the session.
                await self._wanted_states.want(session.id, Wanted.RUNNING, None)
            return True
        return False

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
