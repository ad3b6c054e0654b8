"""Keeps the warm pools at their target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, TemporaryError
from atoll.model.template import TemplateStatus

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.model.template import Template
    from atoll.service.pool import Pool
    from atoll.settings import PoolSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

FIRST_BACKOFF = 2.0
MAX_BACKOFF = 60.0


class PoolRefill:
    def __init__(self, pool: Pool, store: Store, settings: PoolSettings, clock: Clock) -> None:
        self._pool = pool
        self._store = store
        self._settings = settings
        self._clock = clock
        self._failures: dict[tuple[str, datetime, int], tuple[int, float]] = {}
        """How often in a row an edition could not be started, and when it is tried again."""

    async def run(self) -> None:
        """Refill whenever something was taken or a template changed; after a failure, later."""
        while True:
            self._pool.changed.clear()
            try:
                wait = await self._refill()
            except TemporaryError as error:
                log.warning("pool.refill_failed", code=error.code, error=error.message)
                wait = FIRST_BACKOFF
            except Exception as error:
                log.error("pool.refill_failed", exc_info=error)
                wait = FIRST_BACKOFF
            try:
                async with asyncio.timeout(wait):
                    await self._pool.changed.wait()
            except TimeoutError:
                continue

    async def _refill(self) -> float | None:
        """Bring all pools to their target; in how many seconds what failed may be tried again."""
        wanted = await self._wanted()
        editions = {template.edition for template in wanted}
        for ready in self._pool.drop(editions):
            await self._pool.destroy(ready)
        self._failures = {key: value for key, value in self._failures.items() if key in editions}
        while missing := self._missing(wanted):
            batch = missing[: self._settings.concurrency]
            made = await asyncio.gather(
                *(self._pool.make(template, template.default_resources) for template in batch),
                return_exceptions=True,
            )
            for template, result in zip(batch, made, strict=True):
                if isinstance(result, Exception):
                    self._failed(template, result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    self._failures.pop(template.edition, None)
                    self._pool.put(template, result)
        if not self._failures:
            return None
        soonest = min(retry_at for _, retry_at in self._failures.values())
        return max(0.0, soonest - self._clock.monotonic())

    def _failed(self, template: Template, error: Exception) -> None:
        """Put off: the pools of other templates do not wait for one that cannot be started."""
        count = self._failures.get(template.edition, (0, 0.0))[0] + 1
        pause = min(FIRST_BACKOFF * 2 ** (count - 1), MAX_BACKOFF)
        self._failures[template.edition] = (count, self._clock.monotonic() + pause)
        known = isinstance(error, AtollError)
        log.warning(
            "pool.refill_failed",
            template_id=template.id,
            error=str(error),
            failures=count,
            exc_info=None if known else error,
        )

    async def _wanted(self) -> list[Template]:
        found: list[Template] = []
        cursor: str | None = None
        while True:
            page = await self._store.templates.page(cursor=cursor, limit=100)
            for newest in page.items:
                template = await self._ready(newest)
                if template is not None and template.pool_size > 0:
                    found.append(template)
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _ready(self, newest: Template) -> Template | None:
        if newest.status is TemplateStatus.READY:
            return newest
        return await self._store.templates.ready(newest.id)

    def _missing(self, wanted: list[Template]) -> list[Template]:
        now = self._clock.monotonic()
        return [
            template
            for template in wanted
            if self._failures.get(template.edition, (0, now))[1] <= now
            for _ in range(template.pool_size - self._pool.size(template))
        ]
