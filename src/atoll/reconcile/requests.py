"""The sweep of keyed requests: answers that were kept long enough go, with what is kept of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.reconcile.sweep import sweep

if TYPE_CHECKING:
    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

PAUSE = 60.0
"""Seconds between two looks."""
BATCH = 100
"""Requests removed in one transaction."""


class RequestSweep:
    def __init__(self, store: Store, blobs: Blobs, clock: Clock) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock

    async def run(self) -> None:
        await sweep("request_sweep.failed", PAUSE, self.once)

    async def once(self) -> None:
        """Remove all that have expired. Any replica may do it, several at once too."""
        while True:
            removed = await self._store.requests.expire(self._clock.now(), limit=BATCH)
            for request in removed:
                if request.kept is not None:
                    await self._remove(request.kept)
            if len(removed) < BATCH:
                return

    async def _remove(self, key: str) -> None:
        try:
            await self._blobs.remove(key)
        except Exception as error:
            # Its row is gone, so nobody will ask for it again; the others must not stay as well.
            log.warning("request_sweep.blob_left", key=key, exc_info=error)
