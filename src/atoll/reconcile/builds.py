"""
Runs builds of templates.

One replica at a time runs a build (lease). A build whose replica died is found and restarted.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from atoll.service.replica import Replica
    from atoll.service.templates.builds import Builds
    from atoll.settings import TemplateSettings

log = structlog.get_logger(__name__)

BATCH = 100
CHECK_INTERVAL = timedelta(seconds=5)
"""Time between two checks of a build that another replica runs; that replica may die."""


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
