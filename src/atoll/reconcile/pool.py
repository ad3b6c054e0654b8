"""Keeps the warm pools at their target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.model.template import Template
    from atoll.service.pool import Pool
    from atoll.settings import PoolSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

MAX_BACKOFF = 60.0


class PoolRefill:
    def __init__(self, pool: Pool, store: Store, settings: PoolSettings) -> None:
        self._pool = pool
        self._store = store
        self._settings = settings
        self._failures = 0

    async def run(self) -> None:
        """Refill whenever something was taken or a template changed; after a failure, later."""
        while True:
            self._pool.changed.clear()
            try:
                await self._refill()
                self._failures = 0
            except AtollError as error:
                self._failures += 1
                log.warning("pool.refill_failed", error=error.message, failures=self._failures)
            wait = min(2.0**self._failures, MAX_BACKOFF) if self._failures else None
            try:
                async with asyncio.timeout(wait):
                    await self._pool.changed.wait()
            except TimeoutError:
                continue

    async def _refill(self) -> None:
        wanted = await self._wanted()
        for ready in self._pool.drop({(template.id, template.version) for template in wanted}):
            await self._pool.destroy(ready)
        while missing := self._missing(wanted):
            batch = missing[: self._settings.concurrency]
            made = await asyncio.gather(
                *(self._pool.make(template, template.default_resources) for template in batch),
                return_exceptions=True,
            )
            for template, result in zip(batch, made, strict=True):
                if not isinstance(result, BaseException):
                    self._pool.put(template, result)
            for result in made:
                if isinstance(result, BaseException):
                    raise result

    async def _wanted(self) -> list[Template]:
        found: list[Template] = []
        cursor: str | None = None
        while True:
            page = await self._store.templates.page(cursor=cursor, limit=100)
            found += [template for template in page.items if template.pool_size > 0]
            cursor = page.next_cursor
            if cursor is None:
                return found

    def _missing(self, wanted: list[Template]) -> list[Template]:
        return [
            template
            for template in wanted
            for _ in range(template.pool_size - self._pool.size(template))
        ]
