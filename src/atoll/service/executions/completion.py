"""
How the end of an execution is known that another replica sees to.

Who ends it tells, after the record is written; who waits is woken and looks at the record. A
message can be lost, so the record is looked at now and then as well.
"""

from __future__ import annotations

import asyncio
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

LOOK_SECONDS = 5.0
UNHEARD_SECONDS = 1.0
"""The same while nobody can tell."""


class Completions:
    def __init__(
        self,
        replica: Replica,
        offload: Offload,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._offload = offload

    async def tell(self, execution_id: str) -> None:
        """Wake those who wait for its end on any replica."""
        try:
            await self._coordination.notify(f"ended:{execution_id}")
        except TemporaryError as error:
            # Who waits for it elsewhere looks now and then as well.
            log.info("execution.not_told", execution_id=execution_id, error=error.message)

    async def stored(self, execution_id: str) -> Execution | None:
        """The record, however long the store is away."""
        backoff = Backoff()
        while True:
            try:
                return await self._store.executions.get(execution_id)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution_id, error=error.message)
                await backoff.pause()

    async def end_of(self, execution: Execution) -> Execution:
        """The record of an execution that another replica sees to, when it has ended."""
        while not execution.status.ended:
            try:
                found = await self.within(execution.id, LOOK_SECONDS * 12)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution.id, error=error.message)
                continue
            if found is None:
                raise NotFound(f"Execution {execution.id} is gone.", code="execution_not_found")
            execution = found
        return await self._offload.fetch(execution)

    async def within(self, execution_id: str, seconds: float) -> Execution | None:
        """The record when another replica has ended it, or as it is after so many seconds."""
        deadline = self._clock.monotonic() + seconds
        while True:
            try:
                async with self._coordination.listen(f"ended:{execution_id}") as heard:
                    return await self._told_of_end(execution_id, heard, deadline)
            except CoordinationUnavailable:
                pass
            # Nobody can tell of it. The pause comes first: to fail may take no time at all.
            left = deadline - self._clock.monotonic()
            await asyncio.sleep(max(0.0, min(left, UNHEARD_SECONDS)))
            execution = await self._store.executions.get(execution_id)
            if execution is None or execution.status.ended or left <= UNHEARD_SECONDS:
                return execution

    async def _told_of_end(
        self, execution_id: str, heard: Subscription, deadline: float
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
            await heard.wait(min(left, LOOK_SECONDS))
