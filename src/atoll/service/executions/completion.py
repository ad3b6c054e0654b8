"""
Waits for executions that another replica owns: by notification if Redis is there, and by reading
the record every 5 s, because a notification can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from atoll.errors import CoordinationUnavailable, NotFound, TemporaryError
from atoll.service.backoff import Backoff

if TYPE_CHECKING:
    from atoll.coordination.base import Subscription
    from atoll.model.execution import Execution
    from atoll.service.executions.offload import Offload
    from atoll.service.replica import Replica

log = structlog.get_logger(__name__)

READ_INTERVAL = 5.0
"""Seconds between two reads of a record while notifications work."""
UNNOTIFIED_READ_INTERVAL = 1.0
"""The same while coordination is unavailable."""


class Completions:
    def __init__(self, replica: Replica, offload: Offload) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._offload = offload

    async def announce(self, execution_id: str) -> None:
        """Wake all tasks, on any replica, that wait for the end of an execution."""
        try:
            await self._coordination.notify(_topic(execution_id))
        except TemporaryError as error:
            # Other replicas also poll the record.
            log.info("execution.not_announced", execution_id=execution_id, error=error.message)

    async def stored(self, execution_id: str) -> Execution | None:
        """Read the record; wait as long as the store is unavailable."""
        backoff = Backoff()
        while True:
            try:
                return await self._store.executions.get(execution_id)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution_id, error=error.message)
                await backoff.pause()

    async def wait_for_end(self, execution: Execution) -> Execution:
        """The execution after another replica has ended it."""
        while not execution.status.ended:
            try:
                found = await self.wait(execution.id, READ_INTERVAL * 12)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution.id, error=error.message)
                continue
            if found is None:
                raise NotFound(
                    f"Execution {execution.id} does not exist any more.",
                    code="execution_not_found",
                )
            execution = found
        return await self._offload.fetch(execution)

    async def wait(self, execution_id: str, seconds: float) -> Execution | None:
        """The record when it has ended, or its current state after so many seconds."""
        deadline = self._clock.monotonic() + seconds
        while True:
            with contextlib.suppress(CoordinationUnavailable):
                async with self._coordination.listen(_topic(execution_id)) as notifications:
                    return await self._wait(execution_id, notifications, deadline)
            # Pause before the read, because a failing read may return at once.
            left = deadline - self._clock.monotonic()
            await asyncio.sleep(max(0.0, min(left, UNNOTIFIED_READ_INTERVAL)))
            execution = await self._store.executions.get(execution_id)
            if execution is None or execution.status.ended or left <= UNNOTIFIED_READ_INTERVAL:
                return execution

    async def _wait(
        self, execution_id: str, notifications: Subscription, deadline: float
    ) -> Execution | None:
        while True:
            left = deadline - self._clock.monotonic()
            try:
                execution = await self._store.executions.get(execution_id)
                if execution is None or execution.status.ended or left <= 0:
                    return execution
            except TemporaryError:
                if left <= 0:
                    raise
            await notifications.wait(min(left, READ_INTERVAL))


def _topic(execution_id: str) -> str:
    return f"ended:{execution_id}"
