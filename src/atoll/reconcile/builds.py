"""
Runs builds of templates, and removes layers and versions that no template needs.

One replica at a time runs a build (lease). A build whose replica died is found and restarted.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.model.template import TemplateStatus
from atoll.reconcile.sweep import exclusively, sweep

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
CHECK_INTERVAL = timedelta(seconds=5)
"""Time between two checks of a build that another replica runs; that replica may die."""
SWEEP_INTERVAL = 60.0
ORPHAN_AGE = 120.0
"""Seconds that an unused layer is kept: a template may be about to need it."""


class BuildReconciler:
    def __init__(self, replica: Replica, builds: Builds, settings: TemplateSettings) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._builds = builds
        self._concurrency = settings.builds
        self._running: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        """Set when there may be something to build."""
        self._others: dict[str, float] = {}
        """When to check builds again that other replicas run, or that were interrupted."""

    def templates_changed(self) -> None:
        self.changed.set()

    async def run(self) -> None:
        try:
            while True:
                self.changed.clear()
                try:
                    pause = await self.once()
                except TemporaryError as error:
                    log.warning("builds.failed", code=error.code, error=error.message)
                    pause = CHECK_INTERVAL
                except Exception as error:
                    log.error("builds.failed", exc_info=error)
                    pause = CHECK_INTERVAL
                try:
                    async with asyncio.timeout(None if pause is None else pause.total_seconds()):
                        await self.changed.wait()
                except TimeoutError:
                    continue
        finally:
            # Interrupted builds are found again, by this or another replica.
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def once(self) -> timedelta | None:
        """Start the builds that are due; after how long the next one is due, if any."""
        now, passed = self._clock.now(), self._clock.monotonic()
        self._others = {key: until for key, until in self._others.items() if until > passed}
        pause: timedelta | None = None
        after = ""
        while batch := await self._store.templates.unbuilt(limit=BATCH, after=after):
            for template in batch:
                if template.id in self._running or not self._builds.fits(template):
                    continue
                if len(self._running) >= self._concurrency:
                    return pause  # Called again when one of them has ended.
                retry_at = template.build.retry_at if template.build is not None else None
                left = timedelta(0) if retry_at is None else max(retry_at - now, timedelta(0))
                if template.id in self._others:
                    left = max(left, timedelta(seconds=self._others[template.id] - passed))
                if left:
                    pause = left if pause is None else min(pause, left)
                else:
                    self._begin(template.id)
            after = batch[-1].id
        return pause

    def _begin(self, template_id: str) -> None:
        task = asyncio.create_task(self._build(template_id), name=f"build {template_id}")
        self._running[template_id] = task
        task.add_done_callback(lambda _: self._ended(template_id))

    def _ended(self, template_id: str) -> None:
        self._running.pop(template_id, None)
        self.changed.set()

    async def _build(self, template_id: str) -> None:
        try:
            lease = await self._leases.try_lease(f"build:{template_id}")
            if lease is not None:
                async with lease:
                    await self._builds.attempt(template_id)
                return
        except TemporaryError as error:
            log.warning("build.interrupted", template_id=template_id, error=error.message)
        except Exception as error:
            log.error("build.interrupted", template_id=template_id, exc_info=error)
        self._others[template_id] = self._clock.monotonic() + CHECK_INTERVAL.total_seconds()

    async def settled(self) -> None:
        """Wait for all running builds."""
        while self._running:
            await asyncio.wait(list(self._running.values()))


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
        cursor: str | None = None
        while True:
            page = await self._store.templates.page(cursor=cursor, limit=BATCH)
            for newest in page.items:
                if newest.number > self._versions:
                    ready = await self._store.templates.ready(newest.id) or newest
                    await self._forget_old(newest, used | {(ready.id, ready.number)})
            cursor = page.next_cursor
            if cursor is None:
                return

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
    cursor: str | None = None
    while True:
        page = await store.templates.page(cursor=cursor, limit=BATCH)
        for newest in page.items:
            yield newest
            if newest.status is not TemplateStatus.READY:
                ready = await store.templates.ready(newest.id)
                if ready is not None:
                    yield ready
        cursor = page.next_cursor
        if cursor is None:
            return


async def _versions_in_use(store: Store) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    after = ""
    while batch := await store.sessions.unfinished(limit=BATCH, after=after):
        found |= {(session.template_id, session.template_version) for session in batch}
        after = batch[-1].id
    return found
