"""
Replaces instances that their node is about to end.

The node's notices are hints: a session whose notice is lost continues with its next request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.reconcile.loop import work
from atoll.reconcile.queue import Queue

if TYPE_CHECKING:
    from atoll.drivers.base import Disruptions
    from atoll.model.instance import Handle
    from atoll.service.pool.service import Pool
    from atoll.service.replica import Replica
    from atoll.service.sessions.disruptions import SessionDisruptions

WORKERS = 64
"""Sessions whose files are saved at a time; checkpoints have a limit of their own."""
RETRY_DELAY = 1.0

log = structlog.get_logger(__name__)


class DisruptionReconciler:
    def __init__(
        self,
        replica: Replica,
        disruptions: Disruptions,
        sessions: SessionDisruptions,
        pool: Pool,
    ) -> None:
        self._store = replica.store
        self._sessions = sessions
        self._pool = pool
        self.queue = Queue()
        disruptions.subscribe(self._disrupted)

    def _disrupted(self, handle: Handle) -> None:
        # At once: no session may get it any more.
        self._pool.drop(handle.instance_id)
        self.queue.add(handle.instance_id)

    async def run(self) -> None:
        await work(self.queue, self._replace, workers=WORKERS)

    async def _replace(self, instance_id: str) -> float | None:
        instance = await self._store.instances.get(instance_id)
        if instance is None:
            return None
        try:
            done = await self._sessions.replace_instance(instance)
        except AtollError as error:
            log.warning("disruption.postponed", instance_id=instance_id, error=error.message)
            done = False
        return None if done else RETRY_DELAY
