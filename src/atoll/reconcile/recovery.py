"""
Cleans up after earlier replicas, when this one starts as the only replica of its node.

Pooled instances are adopted by this replica's pool; orphans are removed. Instances of running
sessions keep running and are connected to at the next request; sessions whose instance is gone keep
their workspace and get a new instance then. An instance whose state cannot be determined is kept:
the next request or the orphan sweep decides. `sessions.py` handles sessions that are not in their
wanted state, `executions.py` takes over executions that were running.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.model import pool_size
from atoll.model.instance import State
from atoll.service.instances import remove_instance

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.instance import Handle, Instance
    from atoll.model.template import Template
    from atoll.service.pool.service import Pool
    from atoll.service.replica import Replica
    from atoll.service.sessions.timers import SessionTimers
    from atoll.settings import PoolSettings

log = structlog.get_logger(__name__)

BATCH = 100
CONCURRENCY = 8


class Recovery:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        timers: SessionTimers,
        pool: Pool,
        settings: PoolSettings,
    ) -> None:
        self._store = replica.store
        self._node_id = replica.node_id
        self._driver = driver
        self._timers = timers
        self._pool = pool
        self._max_size = settings.max_size
        self._adopting = asyncio.Lock()
        self._kept: set[str] = set()
        """Workspaces that belong to a session."""

    async def run(self) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def limited(handle: Handle) -> None:
            async with slots:
                try:
                    await self._instance(handle)
                # A failure must not delay the others; the sweep retries it.
                except AtollError as error:
                    log.warning("recovery.failed", instance=handle.instance_id, error=error.message)
                except Exception as error:
                    log.warning("recovery.failed", instance=handle.instance_id, exc_info=error)

        self._kept = await self._workspaces_in_use()
        async with asyncio.TaskGroup() as group:
            for handle in await self._driver.handles():
                group.create_task(limited(handle))
        await self._forget_lost_instances()
        await self._discard_workspaces()
        await self._schedule()

    async def _instance(self, handle: Handle) -> None:
        instance = await self._store.instances.get(handle.instance_id)
        state = (await self._driver.observe(handle)).state
        if state is State.UNKNOWN:
            log.warning("instance.not_observed", instance_id=handle.instance_id)
            return
        running = state in (State.RUNNING, State.PAUSED)
        if instance is not None and running:
            if instance.session_id is None:
                template = await self._store.templates.ready(instance.template_id)
                if template is not None and await self._adopted(template, instance):
                    return
            else:
                session = await self._store.sessions.get(instance.session_id)
                # An ended session keeps its instance until its files are saved.
                if session is not None and session.instance_id == instance.id:
                    return
        owned = self._driver.workspaces.of(handle) in self._kept
        await remove_instance(self._store, self._driver, handle, with_workspace=not owned)

    async def _adopted(self, template: Template, instance: Instance) -> bool:
        # One at a time; otherwise all of them would find the pool empty.
        async with self._adopting:
            return (
                template.number == instance.template_version
                and template.created_at <= instance.created_at
                # The demand before the restart is unknown; the refill slowly removes the surplus.
                and self._pool.size(template) < pool_size.limits(template, self._max_size)[1]
                and await self._pool.adopt(template, instance)
            )

    async def _workspaces_in_use(self) -> set[str]:
        found: set[str] = set()
        after = ""
        while batch := await self._store.sessions.holdings(self._node_id, limit=BATCH, after=after):
            found |= {holding.workspace for holding in batch if holding.workspace is not None}
            after = batch[-1].session_id
        return found

    async def _forget_lost_instances(self) -> None:
        there = {handle.instance_id for handle in await self._driver.handles()}
        for instance in await self._store.instances.all():
            if instance.node_id == self._node_id and instance.id not in there:
                await self._store.instances.remove(instance.id)

    async def _discard_workspaces(self) -> None:
        """Remove workspaces that a killed replica left after it had removed their instance."""
        kept = self._kept | {instance.workspace for instance in await self._store.instances.all()}
        kept |= {self._driver.workspaces.of(handle) for handle in await self._driver.handles()}
        for workspace in await self._driver.workspaces.names():
            if workspace not in kept:
                await self._driver.workspaces.discard(workspace)

    async def _schedule(self) -> None:
        after = ""
        while batch := await self._store.sessions.unfinished(
            limit=BATCH, after=after, node_id=self._node_id
        ):
            for session in batch:
                self._timers.schedule(session)
            after = batch[-1].id
