"""
Removes layers that no template needs from a node, and old versions of templates.

A version is needed if it is the newest of its template, the newest that is ready, or in use by a
session.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.model.template import TemplateStatus
from atoll.reconcile.sweep import exclusively, sweep
from atoll.stores.batches import by_id, by_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.base import Driver
    from atoll.model.template import Template
    from atoll.service.replica import Replica
    from atoll.service.templates.builds import Builds
    from atoll.settings import TemplateSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

BATCH = 100
SWEEP_INTERVAL = 60.0
"""Seconds between two sweeps."""
ORPHAN_AGE = 120.0
"""Seconds that an unused layer is kept: a template may be about to need it."""


class LayerSweep:
    """One replica sweeps a node at a time."""

    def __init__(
        self, replica: Replica, driver: Driver, builds: Builds, settings: TemplateSettings
    ) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._driver = driver
        self._builds = builds
        self._versions = settings.versions
        self._first_seen: dict[str, float] = {}

    async def run(self) -> None:
        turn = partial(exclusively, self._leases, f"layers:{self._node_id}", self.once)
        await sweep("layer_sweep.failed", SWEEP_INTERVAL, turn)

    async def once(self) -> None:
        there = await self._driver.images.names()
        needed: set[str] = set()
        async for template in versions_needed(self._store):
            needed |= {layer.name for layer in template.layers}
            if (
                template.build is None
                and (own := self._driver.images.image_layer(template)) is not None
            ):
                needed.add(own.name)
        await self._discard([name for name in there if name not in needed])
        await self._forget_versions()

    async def _forget_versions(self) -> None:
        used = await _versions_in_use(self._store)
        async for newest in by_page(self._store.templates.page):
            if newest.number > self._versions:
                ready = await self._store.templates.ready(newest.id) or newest
                await self._forget_old(newest, used | {(ready.id, ready.number)})

    async def _forget_old(self, newest: Template, used: set[tuple[str, int]]) -> None:
        below = newest.number - self._versions + 1
        while below > 1:
            batch = await self._store.templates.before(newest.id, number=below, limit=BATCH)
            for template in batch:
                if (template.id, template.number) not in used:
                    await self._builds.drop(template)
            if len(batch) < BATCH:
                return
            below = batch[-1].number

    async def _discard(self, unused: list[str]) -> None:
        now = self._clock.monotonic()
        seen: dict[str, float] = {}
        for name in unused:
            seen[name] = self._first_seen.get(name, now)
            if now - seen[name] < ORPHAN_AGE:
                continue
            lease = await self._leases.try_lease(f"layer:{self._node_id}:{name}")
            if lease is not None:
                async with lease:
                    log.info("layer.discarded", layer=name)
                    await self._driver.images.remove(name)
        self._first_seen = seen


async def versions_needed(store: Store) -> AsyncIterator[Template]:
    """The newest version of each template, the newest ready one, and those that sessions use."""
    for template_id, number in await _versions_in_use(store):
        found = await store.templates.numbered(template_id, number)
        if found is not None:
            yield found
    async for newest in by_page(store.templates.page):
        yield newest
        if newest.status is not TemplateStatus.READY:
            ready = await store.templates.ready(newest.id)
            if ready is not None:
                yield ready


async def _versions_in_use(store: Store) -> set[tuple[str, int]]:
    return {
        (session.template_id, session.template_version)
        async for session in by_id(store.sessions.unfinished)
    }
