"""
Executions that another replica sees to, as they are heard here.

Their output comes from the executor itself, which tells it to as many as listen; their end from the
record, which the other replica writes. One mirror serves all who listen here; it goes with the
execution.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.service.running import Running

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.runs import Runs
    from atoll.service.sessions import Sessions
    from atoll.service.tasks import Tasks

log = structlog.get_logger(__name__)


class Mirrors:
    def __init__(self, sessions: Sessions, runs: Runs, tasks: Tasks) -> None:
        self._sessions = sessions
        self._runs = runs
        self._tasks = tasks
        self._mirrors: dict[str, Running] = {}

    def of(self, execution: Execution) -> Running:
        found = self._mirrors.get(execution.id)
        if found is None:
            found = self._mirrors[execution.id] = Running(execution)
            self._tasks.start(self._follow(found), f"mirror {execution.id}", waits=True)
        return found

    async def _follow(self, mirror: Running) -> None:
        execution_id = mirror.execution.id
        hearing = asyncio.ensure_future(self._hear(mirror))
        try:
            ended = await self._runs.end_of(mirror.execution)
            mirror.complete(ended)
            mirror.finish(ended)
        finally:
            hearing.cancel()
            self._mirrors.pop(execution_id, None)

    async def _hear(self, mirror: Running) -> None:
        try:
            live = await self._sessions.reach(mirror.execution.session_id)
            if live is not None:
                await live.link.attach(mirror.execution.id, mirror.sequence, mirror, expected=True)
        except AtollError as error:
            # The record brings the rest.
            log.debug("mirror.lost", execution_id=mirror.execution.id, error=error.message)
