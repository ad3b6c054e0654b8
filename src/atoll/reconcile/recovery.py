"""
After a start: what an earlier process of the control plane left.

Instances of running sessions are reached again and what runs in them is followed to its end; pooled
ones go back to the pool; what has no owner is removed. Executions whose instance is gone are
recorded as crashed. Sessions whose instance is gone keep their workspace and get a new one at the
next request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.model.instance import State
from atoll.model.session import Cause
from atoll.service.pool import Ready

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.execution import Execution
    from atoll.model.instance import Handle
    from atoll.service.executions import Executions
    from atoll.service.pool import Pool
    from atoll.service.sessions import Sessions
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

BATCH = 100
CONCURRENCY = 8


class Recovery:
    def __init__(
        self, store: Store, driver: Driver, sessions: Sessions, executions: Executions, pool: Pool
    ) -> None:
        self._store = store
        self._driver = driver
        self._sessions = sessions
        self._executions = executions
        self._pool = pool
        self._kept: set[str] = set()
        """Workspaces that a session has a right to."""
        self._found: set[str] = set()
        """Instances that were there before; what runs in a new one was not running before."""

    async def run(self) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def limited(handle: Handle) -> None:
            async with slots:
                try:
                    await self._instance(handle)
                except Exception as error:
                    # One that cannot be reached must not keep the others waiting; the sweep looks
                    # again and again.
                    log.warning("recovery.failed", instance=handle.instance_id, exc_info=error)

        self._kept = await self._workspaces_in_use()
        handles = await self._driver.handles()
        self._found = {handle.instance_id for handle in handles}
        async with asyncio.TaskGroup() as group:
            for handle in handles:
                group.create_task(limited(handle))
        await self._forget_lost_instances()
        await self._schedule_ends()
        await self._executions_left()

    async def _instance(self, handle: Handle) -> None:
        instance = await self._store.instances.get(handle.instance_id)
        running = (await self._driver.observe(handle)).state is State.RUNNING
        if instance is not None and running:
            if instance.session_id is None:
                template = await self._store.templates.get(instance.template_id)
                if template is not None and template.updated_at <= instance.created_at:
                    link = await self._driver.connect(handle)
                    self._pool.put(template, Ready(instance, link, template.default_resources))
                    return
            else:
                session = await self._store.sessions.get(instance.session_id)
                ended = session is None or session.status.ended
                if session is not None and not ended and session.instance_id == instance.id:
                    await self._sessions.live(session.id)
                    return
        await self._driver.destroy(handle)
        await self._store.instances.remove(handle.instance_id)
        workspace = self._driver.workspace_of(handle)
        if workspace not in self._kept:
            await self._driver.discard(workspace)

    async def _workspaces_in_use(self) -> set[str]:
        found: set[str] = set()
        after = ""
        while batch := await self._store.sessions.unfinished(limit=BATCH, after=after):
            found |= {session.workspace for session in batch if session.workspace is not None}
            after = batch[-1].id
        return found

    async def _forget_lost_instances(self) -> None:
        there = {handle.instance_id for handle in await self._driver.handles()}
        for instance in await self._store.instances.all():
            if instance.id not in there:
                await self._store.instances.remove(instance.id)

    async def _schedule_ends(self) -> None:
        after = ""
        while batch := await self._store.sessions.unfinished(limit=BATCH, after=after):
            for session in batch:
                self._sessions.schedule_end(session)
            after = batch[-1].id

    async def _executions_left(self) -> None:
        """What runs is followed before what waits is started, which is in the order it came."""
        waiting: list[Execution] = []
        after = ""
        while batch := await self._store.executions.unfinished(limit=BATCH, after=after):
            for execution in batch:
                live = self._sessions.reachable(execution.session_id)
                if live is None or live.instance.id not in self._found:
                    await self._executions.abandon(
                        execution,
                        Cause.INSTANCE_LOST,
                        "The control plane was restarted and the execution was not found again.",
                    )
                elif any(run["id"] == execution.id for run in live.link.hello.get("runs", ())):
                    self._executions.attach(execution, live)
                else:
                    # The executor forgets a run only when its result is stored: this one has not
                    # begun.
                    waiting.append(execution)
            after = batch[-1].id
        for execution in sorted(waiting, key=lambda item: item.created_at):
            self._executions.resume(execution)
