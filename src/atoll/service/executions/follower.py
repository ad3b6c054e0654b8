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
from atoll.service.executions.run import Running

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.background import Tasks
    from atoll.service.executions.completion import Ends
    from atoll.service.sessions.connections import Lives
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0


class Mirrors:
    def __init__(self, lives: Lives, ends: Ends, tasks: Tasks, settings: ExecutionSettings) -> None:
        self._lives = lives
        self._ends = ends
        self._tasks = tasks
        self._settings = settings
        self._mirrors: dict[str, Running] = {}
        self._listeners: dict[Running, int] = {}

    def join(self, execution: Execution) -> Running:
        """Listen, and `leave` in the end."""
        mirror = self._mirrors.get(execution.id)
        if mirror is None:
            mirror = self._mirrors[execution.id] = Running(execution)
            mirror.task = self._tasks.start(
                self._follow(mirror), f"mirror {execution.id}", waits=True
            )
        self._listeners[mirror] = self._listeners.get(mirror, 0) + 1
        return mirror

    def leave(self, mirror: Running) -> None:
        self._listeners[mirror] -= 1
        if not self._listeners[mirror]:
            del self._listeners[mirror]
            if mirror.task is not None:
                mirror.task.cancel()
            self._forget(mirror)

    def _forget(self, mirror: Running) -> None:
        if self._mirrors.get(mirror.execution.id) is mirror:
            del self._mirrors[mirror.execution.id]

    async def _follow(self, mirror: Running) -> None:
        hearing = asyncio.ensure_future(self._hear(mirror))
        try:
            ended = await self._ends.end_of(mirror.execution)
            mirror.complete(ended)
            mirror.finish(ended)
        finally:
            hearing.cancel()
            self._forget(mirror)
            # Also when there is no record any more: nobody is to wait for ever.
            mirror.finish(mirror.execution)

    async def _hear(self, mirror: Running) -> None:
        """
        Until it ends; what is missed while nobody can be heard, the record brings. An instance that
        was lost is followed by the next attempt, in the one that takes its place.
        """
        while True:
            try:
                live = await self._lives.reach(mirror.execution.session_id)
                if live is not None:
                    intake = mirror.bounded(self._settings, requested=False)
                    await live.link.attach(
                        mirror.execution.id, mirror.sequence, mirror, intake, expected=True
                    )
                    return
            except AtollError as error:
                log.debug("mirror.lost", execution_id=mirror.execution.id, error=error.message)
            await asyncio.sleep(AGAIN_SECONDS)
            stored = await self._ends.stored(mirror.execution.id)
            if stored is None or stored.status.ended:
                return
            if stored.retry_count > mirror.execution.retry_count:
                lost = stored.attempts[-1] if stored.attempts else None
                mirror.next_attempt(stored, cause=None if lost is None else lost.cause)
