"""Records that an execution runs, once it has run for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError, VersionConflict
from atoll.model.event import execution_event
from atoll.model.execution import ExecutionStatus

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.service.executions.run import Run
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

STATUS_DELAY = 1.0
"""Seconds after which an execution is recorded as running; a shorter one has two commits only."""


class StatusWriter:
    """Other replicas, and lists by status, know only the record. Used around an attempt."""

    def __init__(self, run: Run, store: Store, clock: Clock) -> None:
        self._run = run
        self._store = store
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._schedule()

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            # The result has to follow the version that this writes.
            await asyncio.wait([self._writing])

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STATUS_DELAY, self._look)

    def _look(self) -> None:
        if self._run.execution.status is ExecutionStatus.RUNNING:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        else:
            self._schedule()

    async def _write(self) -> None:
        execution = self._run.execution
        try:
            event = execution_event(execution, "running", self._clock.now())
            stored = await self._store.executions.save(execution, event=event)
        except (VersionConflict, TemporaryError) as error:
            # Whether this replica still owns it turns out when the result is written.
            log.info("execution.status_not_stored", execution_id=self._run.id, error=error.message)
        else:
            self._run.version_read(stored.version)
