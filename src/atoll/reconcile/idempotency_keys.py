"""Deletes expired answers to requests with an `Idempotency-Key`, and their blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.reconcile.sweep import sweep

if TYPE_CHECKING:
    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 60.0
"""Seconds between two sweeps."""
BATCH = 100
"""Requests removed in one transaction."""


class IdempotencyKeySweep:
    def __init__(self, store: Store, blobs: Blobs, clock: Clock) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock

    async def run(self) -> None:
        await sweep("request_sweep.failed", SWEEP_INTERVAL, self.once)

    async def once(self) -> None:
        """Delete all that have expired. Several replicas may do so at the same time."""
        while True:
            removed = await self._store.idempotency_records.expire(self._clock.now(), limit=BATCH)
            for request in removed:
                if request.kept is not None:
                    await self._remove(request.kept)
            if len(removed) < BATCH:
                return

    async def _remove(self, key: str) -> None:
        try:
            await self._blobs.remove(key)
        except Exception as error:
            # Its row is deleted, so this is not retried; the other blobs must still be removed.
            log.warning("request_sweep.blob_left", key=key, exc_info=error)
