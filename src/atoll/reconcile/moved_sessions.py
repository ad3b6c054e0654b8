"""
What this node still has of sessions that are on another node now.

They left while it was taken for lost, or was drained. Nobody will come for their instances here,
and what they would save is not wanted any more, so all of it goes as soon as that is found out:
the link of this process first, then the instance, then its files. What runs in them is handed over
by whoever follows it, when the link goes. A session that comes back has a new instance.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.instance import Handle
    from atoll.service.executions.runner import Runner
    from atoll.service.replica import Replica
    from atoll.service.sessions.connections import Connections

log = structlog.get_logger(__name__)

CONCURRENCY = 8


class MovedSessions:
    def __init__(
        self, replica: Replica, driver: Driver, connections: Connections, runner: Runner
    ) -> None:
        self._store = replica.store
        self._node_id = replica.node_id
        self._driver = driver
        self._connections = connections
        self._runner = runner

    async def once(self) -> int:
        """How many instances were removed."""
        for session_id in sorted(self._connections.session_ids() | self._runner.session_ids()):
            if await self._has_left(session_id):
                self._connections.disconnect(session_id)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def looked_at(handle: Handle) -> bool:
            async with slots:
                try:
                    return await self._removed(handle)
                except Exception as error:
                    # One that cannot be removed does not keep the others; the sweep finds it.
                    log.warning("departed.failed", instance=handle.instance_id, exc_info=error)
                    return False

        handles = await self._driver.handles()
        return sum(await asyncio.gather(*(looked_at(handle) for handle in handles)))

    async def _removed(self, handle: Handle) -> bool:
        instance = await self._store.instances.get(handle.instance_id)
        if instance is None or instance.session_id is None:
            return False
        if not await self._has_left(instance.session_id):
            return False
        log.info("departed.instance", instance=instance.id, session_id=instance.session_id)
        await self._driver.destroy(handle)
        await self._driver.workspaces.discard(instance.workspace)
        await self._store.instances.remove(instance.id)
        return True

    async def _has_left(self, session_id: str) -> bool:
        session = await self._store.sessions.get(session_id)
        return session is not None and session.runtime_node != self._node_id
