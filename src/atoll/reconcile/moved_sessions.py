"""
Removes what this node still has of sessions that have moved to another node.

They moved while this node counted as lost, or was drained. Their instances here will not be used
again, and their files must not be saved, so everything is removed once this is noticed: the link of
this process first, then the instance, then its files. The runner hands over what runs in them when
the link closes. A session that comes back gets a new instance.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.service.instances import remove_instance

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
        """Remove them; the number of removed instances."""
        for session_id in sorted(self._connections.session_ids() | self._runner.session_ids()):
            if await self._has_left(session_id):
                self._connections.disconnect(session_id)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def check(handle: Handle) -> bool:
            async with slots:
                try:
                    return await self._removed(handle)
                except Exception as error:
                    # A failure must not delay the others; the sweep retries it.
                    log.warning("moved_session.failed", instance=handle.instance_id, exc_info=error)
                    return False

        handles = await self._driver.handles()
        return sum(await asyncio.gather(*(check(handle) for handle in handles)))

    async def _removed(self, handle: Handle) -> bool:
        instance = await self._store.instances.get(handle.instance_id)
        if instance is None or instance.session_id is None:
            return False
        if not await self._has_left(instance.session_id):
            return False
        log.info("moved_session.removed", instance=instance.id, session_id=instance.session_id)
        await remove_instance(self._store, self._driver, handle, with_workspace=True)
        return True

    async def _has_left(self, session_id: str) -> bool:
        session = await self._store.sessions.get(session_id)
        return session is not None and session.runtime_node != self._node_id
