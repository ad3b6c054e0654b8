"""Deletes expired checkpoints of ended sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.reconcile.sweep import sweep

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 60.0
"""Seconds between two sweeps."""
BATCH = 100


class CheckpointSweep:
    def __init__(self, store: Store, checkpoints: Checkpoints, clock: Clock) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._clock = clock

    async def run(self) -> None:
        await sweep("checkpoint_sweep.failed", SWEEP_INTERVAL, self.once)

    async def once(self) -> None:
        """Delete all that have expired. Several replicas may do so at the same time."""
        while True:
            found = await self._store.checkpoints.expired(self._clock.now(), limit=BATCH)
            failed = 0
            for checkpoint in found:
                try:
                    await self._checkpoints.forget(checkpoint.id)
                except AtollError as error:
                    # The next sweep retries it; the others must not wait.
                    failed += 1
                    log.warning(
                        "checkpoint.not_forgotten", session_id=checkpoint.id, error=error.message
                    )
                else:
                    log.debug("checkpoint.forgotten", session_id=checkpoint.id)
            if failed or len(found) < BATCH:
                return
