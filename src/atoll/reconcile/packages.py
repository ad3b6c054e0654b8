"""
Removes the least recently used package environments when a node keeps more than its limit.

An environment that a session uses is never removed, whichever replica created the session, nor one
that was used recently and may be about to become part of a session.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.reconcile.layers import versions_needed
from atoll.reconcile.sweep import exclusively, sweep
from atoll.service.packages.service import RESOLUTION_TTL
from atoll.stores.batches import by_id

if TYPE_CHECKING:
    from atoll.drivers.base import PackageEnvironments
    from atoll.service.replica import Replica
    from atoll.settings import PackageSettings

log = structlog.get_logger(__name__)

ORPHAN_AGE = timedelta(minutes=10)
LOGS_KEPT = timedelta(days=2)

SWEEP_INTERVAL = 300.0
"""Seconds between two sweeps."""


class PackageSweep:
    def __init__(
        self, replica: Replica, packages: PackageEnvironments, settings: PackageSettings
    ) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._environments = packages
        self._settings = settings

    async def run(self) -> None:
        turn = partial(exclusively, self._leases, f"packages:{self._node_id}", self.once)
        await sweep("package_sweep.failed", SWEEP_INTERVAL, turn)

    async def once(self) -> None:
        now = self._clock.now()
        await self._environments.forget(now - max(LOGS_KEPT, RESOLUTION_TTL))
        listed = await self._environments.listed()
        total = sum(info.size for info in listed)
        if total <= self._settings.cache_size:
            return
        # After the list: environments used since then are recent.
        needed = await self._needed()
        for info in listed:
            if total <= self._settings.cache_size:
                return
            if info.name in needed:
                continue
            if await self._environments.remove(info.name, unless_used_since=now - ORPHAN_AGE):
                log.info("packages.removed", environment=info.name, size=info.size)
                total -= info.size

    async def _needed(self) -> set[str]:
        """Environments of templates, and of sessions of this node that have not ended."""
        found: set[str] = set()
        async for session in by_id(self._store.sessions.unfinished):
            install = session.install
            if session.runtime_node == self._node_id and install is not None:
                found.add(install.environment or "")
        async for template in versions_needed(self._store):
            if template.build is not None:
                found.add(template.build.environment or "")
        return found
