"""
Executions that another replica sees to, as they are heard here.

Their output comes from the executor itself, which tells it to as many as listen; their end from the
record, which the other replica writes. One mirror serves all who listen here; it goes with the last
of them, or with the execution.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.service.executions.run import Run

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.background import BackgroundTasks
    from atoll.service.executions.completion import Completions
    from atoll.service.sessions.access import SessionAccess
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0


class Followers:
    def __init__(
        self,
        sessions: SessionAccess,
        completions: Completions,
        background: BackgroundTasks,
        settings: ExecutionSettings,
    ) -> None:
        self._sessions = sessions
        self._completions = completions
        self._background = background
        self._settings = settings
        self._followers: dict[str, Run] = {}
        self._listeners: dict[Run, int] = {}

    def join(self, execution: Execution) -> Run:
        """Listen, and `leave` in the end."""
        mirror = self._followers.get(execution.id)
        if mirror is None:
            mirror = self._followers[execution.id] = Run(execution)
            mirror.task = self._background.start(
                self._follow(mirror), f"mirror {execution.id}", waits=True
            )
        self._listeners[mirror] = self._listeners.get(mirror, 0) + 1
        return mirror

    def leave(self, mirror: Run) -> None:
        self._listeners[mirror] -= 1
        if not self._listeners[mirror]:
            del self._listeners[mirror]
            if mirror.task is not None:
                mirror.task.cancel()
            self._forget(mirror)

    def _forget(self, mirror: Run) -> None:
        if self._followers.get(mirror.execution.id) is mirror:
            del self._followers[mirror.execution.id]

    async def _follow(self, mirror: Run) -> None:
        hearing = asyncio.ensure_future(self._hear(mirror))
        try:
            ended = await self._completions.end_of(mirror.execution)
            mirror.complete(ended)
            mirror.finish(ended)
        finally:
            hearing.cancel()
            self._forget(mirror)
            # Also when there is no record any more: nobody is to wait for ever.
            mirror.finish(mirror.execution)

    async def _hear(self, mirror: Run) -> None:
        """
        Until it ends; what is missed while nobody can be heard, the record brings. An instance that
        was lost is followed by the next attempt, in the one that takes its place.
        """
        while True:
            try:
                connection = await self._sessions.connections.reach(mirror.execution.session_id)
                if connection is not None:
                    intake = mirror.bounded(self._settings, requested=False)
                    await connection.link.attach(
                        mirror.execution.id, mirror.sequence, mirror, intake, expected=True
                    )
                    return
            except AtollError as error:
                log.debug("mirror.lost", execution_id=mirror.execution.id, error=error.message)
            await asyncio.sleep(AGAIN_SECONDS)
            stored = await self._completions.stored(mirror.execution.id)
            if stored is None or stored.status.ended:
                return
            if stored.retry_count > mirror.execution.retry_count:
                lost = stored.attempts[-1] if stored.attempts else None
                mirror.next_attempt(stored, cause=None if lost is None else lost.cause)
