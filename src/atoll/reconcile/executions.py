"""
Takes over executions whose replica is lost.

A replica is lost when its heartbeats stop; one that shuts down announces that, so its executions
are taken over at once. Several replicas may try at the same time: the first compare-and-set wins.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.service.executions.runner import REPLICA_LEFT

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.executions.runner import Runner
    from atoll.service.replica import Replica
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

BATCH = 100
STRAY_AGE = timedelta(seconds=60)
"""
Age at which an execution that this replica owns but does not run is revoked. Its record was written
although the store reported a failure, and its client was told that it failed.
"""


class ExecutionAdoption:
    def __init__(self, replica: Replica, runner: Runner, settings: CoordinationSettings) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._clock = replica.clock
        self._runner = runner
        self._interval = settings.presence_ttl.total_seconds() / 3

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(REPLICA_LEFT) as subscription:
                    await subscription.wait(self._interval)
                await self.once()
            except TemporaryError as error:
                log.warning("adoption.failed", code=error.code, error=error.message)
                await asyncio.sleep(self._interval)
            except Exception as error:
                log.error("adoption.failed", exc_info=error)
                await asyncio.sleep(self._interval)

    async def once(self) -> None:
        # If the back-end lost the presence of this replica, it lost that of the others too.
        await self._leases.heartbeat()
        for holder in await self._store.executions.holders():
            if holder == self._coordination.replica:
                await self._revoke_strays()
            elif holder is None or (
                self._leases.presence_reliable and not await self._coordination.alive(holder)
            ):
                for execution in await self._held_by(holder):
                    await self._runner.adopt(execution)

    async def _held_by(self, holder: str | None) -> list[Execution]:
        """Its unfinished executions, in the order in which they were submitted."""
        found: list[Execution] = []
        after = ""
        while batch := await self._store.executions.unfinished(
            limit=BATCH, after=after, holder=holder
        ):
            found += [execution for execution in batch if execution.holder == holder]
            after = batch[-1].id
        return sorted(found, key=lambda execution: execution.created_at)

    async def _revoke_strays(self) -> None:
        old = self._clock.now() - STRAY_AGE
        for execution in await self._held_by(self._coordination.replica):
            if execution.created_at > old or self._runner.get(execution.id) is not None:
                continue
            if execution.version > 1:
                # Taken over despite a reported failure: it was accepted and may have run.
                capacity = await self._runner.capacity_here(execution.session_id)
                if capacity is None:
                    await self._runner.release(execution.id)  # Its session has moved.
                else:
                    self._runner.start(execution, capacity, adopted=True)
            else:
                await self._runner.revoke(execution)
