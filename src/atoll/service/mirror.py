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
from atoll.service.running import Running

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.ends import Ends
    from atoll.service.lives import Lives
    from atoll.service.tasks import Tasks

log = structlog.get_logger(__name__)


class Mirrors:
    def __init__(self, lives: Lives, ends: Ends, tasks: Tasks) -> None:
        self._lives = lives
        self._ends = ends
        self._tasks = tasks
        self._mirrors: dict[str, Running] = {}

    def join(self, execution: Execution) -> Running:
        """Listen, and `leave` in the end."""
        mirror = self._mirrors.get(execution.id)
        if mirror is None:
            mirror = self._mirrors[execution.id] = Running(execution)
            mirror.task = self._tasks.start(
                self._follow(mirror), f"mirror {execution.id}", waits=True
            )
        mirror.listeners += 1
        return mirror

    def leave(self, mirror: Running) -> None:
        mirror.listeners -= 1
        if not mirror.listeners and mirror.task is not None:
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
        try:
            live = await self._lives.reach(mirror.execution.session_id)
            if live is not None:
                await live.link.attach(mirror.execution.id, mirror.sequence, mirror, expected=True)
        except AtollError as error:
            # The record brings the rest.
            log.debug("mirror.lost", execution_id=mirror.execution.id, error=error.message)
