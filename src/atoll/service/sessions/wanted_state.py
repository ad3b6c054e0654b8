"""
Records the wanted state of a session, and waits until the session reaches it.

The request is stored in the record, so the state is reached eventually, whatever fails meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.errors import VersionConflict
from atoll.model.execution import ExecutionStatus
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.model.session_changes import wanting
from atoll.service.sessions.records import not_running

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.transitions import Transitions


class WantedStates:
    def __init__(
        self,
        core: SessionCore,
        transitions: Transitions,
        *,
        max_wait: timedelta,
    ) -> None:
        """`max_wait` limits how long `reach` waits."""
        self._replica = core.replica
        self._clock = core.replica.clock
        self._records = core.records
        self._observers = core.observers
        self._transitions = transitions
        self._max_wait = max_wait.total_seconds()

    async def reach(
        self, session_id: str, wanted: Wanted, cause: Cause | None, *, wait: float
    ) -> Session:
        """
        Request a state. Returns the session when it is reached, or in its current state after
        `wait` seconds.
        """
        await self.want(session_id, wanted, cause)
        settling = self._replica.background.start(
            self._transitions.settle(session_id), f"settle {session_id}"
        )
        done, _ = await asyncio.wait([settling], timeout=min(wait, self._max_wait))
        if done:
            settling.result()
        session = await self._records.get(session_id)
        self._observers.session_changed(session)
        return session

    async def want(
        self, session_id: str, wanted: Wanted, cause: Cause | None, *, of: Session | None = None
    ) -> Session:
        """
        Record the wanted state. With `of`, only if the session has not changed since that was read;
        else `VersionConflict`. A stop of a session that is stopped or archived changes nothing.
        """
        while True:
            session = of or await self._records.usable(session_id)
            if session.status is SessionStatus.CREATING and wanted is not Wanted.RUNNING:
                raise not_running(session, "Wait until it runs.")
            if session.wanted is wanted or (wanted is Wanted.STOPPED and session.wanted.stops):
                if session.retry_at is None:
                    return session
                # A repeated request does not wait for the next retry.
                wanted = session.wanted
            try:
                return await self._records.save(
                    wanting(session, wanted, cause, self._clock.now()), event="wanted"
                )
            except VersionConflict:
                if of is not None:
                    raise

    async def is_busy(self, session_id: str) -> bool:
        """Whether an execution runs in the session or waits for it."""
        for status in (ExecutionStatus.RUNNING, ExecutionStatus.PENDING):
            page = await self._replica.store.executions.page(
                session_id=session_id, status=status, limit=1
            )
            if page.items:
                return True
        return False

    async def end_all(self) -> None:
        """End all sessions of this node, because its server ends for good."""
        node_id, after = self._replica.node_id, ""
        while unfinished := await self._replica.store.sessions.unfinished(
            limit=100, after=after, node_id=node_id
        ):
            for session in unfinished:
                await self._records.end_by_id(session.id, SessionStatus.TERMINATED, Cause.SHUTDOWN)
            after = unfinished[-1].id
        after = ""
        while held := await self._replica.store.sessions.holdings(node_id, limit=100, after=after):
            for holding in held:
                # It had ended before, and no other process will clear it.
                if not self._transitions.is_clearing(holding.session_id):
                    self._replica.background.start(
                        self._transitions.settle(holding.session_id),
                        f"clear {holding.session_id}",
                    )
            after = held[-1].session_id
