"""
Takes over executions whose replica is lost.

A replica is lost when its heartbeats stop; one that shuts down announces that, so its executions
are taken over at once. Several replicas may try at the same time: the first compare-and-set wins.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import VersionConflict
from atoll.reconcile.sweep import sweep_on_notify
from atoll.service.executions.records import RELEASED

if TYPE_CHECKING:
    from typing import NoReturn

    from atoll.model.execution import Execution
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.executions.runner import Runner
    from atoll.service.replica import Replica
    from atoll.service.sessions.records import SessionRecords
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

BATCH = 100
STRAY_AGE = timedelta(seconds=60)
"""
Age at which an execution that this replica owns but does not run is revoked. Its record was written
although the store reported a failure, and its client received that failure.
"""


class ExecutionAdoption:
    def __init__(
        self,
        replica: Replica,
        sessions: SessionRecords,
        records: ExecutionRecords,
        runner: Runner,
        settings: CoordinationSettings,
    ) -> None:
        self._replica = replica
        self._store = replica.store.executions
        self._sessions = sessions
        self._records = records
        self._runner = runner
        self._interval = settings.presence_ttl.total_seconds() / 3

    async def run(self) -> NoReturn:
        await sweep_on_notify(
            "adoption.failed", self._replica.coordination, RELEASED, self._interval, self.once
        )

    async def once(self) -> None:
        # If the back-end lost the presence of this replica, it lost that of the others too.
        leases = self._replica.leases
        await leases.heartbeat()
        for owner in await self._store.holders():
            if owner == self._replica.id:
                await self._recover_strays()
            elif owner is None or (
                leases.presence_reliable and not await self._replica.coordination.alive(owner)
            ):
                for execution in await self._owned_by(owner):
                    await self._adopt(execution)

    async def _owned_by(self, owner: str | None) -> list[Execution]:
        """Its unfinished executions, in the order in which they were submitted."""
        found: list[Execution] = []
        after = ""
        while batch := await self._store.unfinished(limit=BATCH, after=after, holder=owner):
            found += [execution for execution in batch if execution.holder == owner]
            after = batch[-1].id
        return sorted(found, key=lambda execution: execution.created_at)

    async def _adopt(self, execution: Execution) -> None:
        """Take over an execution, unless another replica is faster."""
        if self._runner.get(execution.id) is not None:
            return
        capacity = await self._sessions.capacity_here(execution.session_id)
        if capacity is None:
            return
        try:
            execution = await self._store.save(
                dataclasses.replace(execution, holder=self._replica.id)
            )
        except VersionConflict:
            return
        log.info("execution.adopted", execution_id=execution.id)
        await self._runner.start_from_record(execution, capacity)

    async def _recover_strays(self) -> None:
        """Run or revoke executions of this replica that it does not run."""
        old = self._replica.clock.now() - STRAY_AGE
        for execution in await self._owned_by(self._replica.id):
            if execution.created_at > old or self._runner.get(execution.id) is not None:
                continue
            if execution.version > 1:
                # Taken over despite a reported failure: it was accepted and may have run.
                capacity = await self._sessions.capacity_here(execution.session_id)
                if capacity is None:
                    await self._records.release(execution.id)  # Its session has moved.
                else:
                    await self._runner.start_from_record(execution, capacity)
            else:
                await self._records.revoke(execution)
