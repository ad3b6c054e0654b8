"""
Adjusts the size of warm pools to demand.

A pool grows with the creates of the last minute and shrinks when they stop; all pools of a node
together stay within a share of its memory. New instances are created before old ones are removed.
Instances start and end in tasks of their own, so a template that starts slowly, or not at all, does
not delay the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, TemporaryError
from atoll.model import pool_size
from atoll.model.pool_size import Level, Limit, PoolDemand
from atoll.model.template import TemplateStatus
from atoll.service.pool.service import RATE_WINDOW, PoolPlan
from atoll.service.pool.stats import START_SECONDS

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.template import Template
    from atoll.service.instances import InstanceMaker, ReadyInstance
    from atoll.service.pool.service import Pool, Version
    from atoll.settings import PoolSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

FIRST_BACKOFF = 2.0
MAX_BACKOFF = 60.0
STEPS = 4
"""Steps per window in which an oversized pool shrinks."""
MEMORY_CACHE = 1.0
"""Seconds for which the node's memory usage is cached."""
TEMPLATE_CACHE = 10.0
"""Seconds for which templates are cached, unless one changes."""
FULL_INTERVAL = 5.0
"""Seconds between two checks of a node with too little free memory."""

CONCURRENCY = 2
"""Instances that are started at the same time."""
MAX_AGE = 3600.0
"""Seconds after which a ready instance is replaced."""
MEMORY_RESERVE = 0.05
"""Share of the node's memory that must be free before another instance is started."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of the node for ready instances."""

    budget: int
    """Bytes, for the pools of all replicas of the node."""
    others: dict[str, int]
    """Ready instances of the other replicas, by template."""
    full: bool
    """Whether too little memory is free for another instance."""
    until: float


class PoolRefill:
    def __init__(
        self,
        pool: Pool,
        maker: InstanceMaker,
        store: Store,
        driver: Driver,
        settings: PoolSettings,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._maker = maker
        self._store = store
        self._driver = driver
        self._settings = settings
        self._clock = clock
        self._pause = RATE_WINDOW.total_seconds() / STEPS
        self._failures: dict[Version, tuple[int, float, str]] = {}
        """For each version that fails to start: failures in a row, next retry, and the error."""
        self._levels: dict[Version, Level] = {}
        self._templates: list[Template] = []
        self._read_at = float("-inf")
        self._memory = MemoryBudget(0, {}, full=False, until=0.0)
        self._making: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def run(self) -> None:
        """Adjust pools after every change, and when time alone requires it."""
        try:
            while True:
                try:
                    wait = await self.turn()
                except TemporaryError as error:
                    log.warning("pool.refill_failed", code=error.code, error=error.message)
                    wait = FIRST_BACKOFF
                except Exception as error:
                    log.error("pool.refill_failed", exc_info=error)
                    wait = FIRST_BACKOFF
                await self._pool.wait_for_change(wait)
        finally:
            for task in self._making:
                task.cancel()
            await asyncio.gather(*self._making, *self._ending, return_exceptions=True)

    async def turn(self) -> float | None:
        """Start what is due; after how many seconds time alone requires the next turn."""
        if self._pool.have_templates_changed():
            self._read_at = float("-inf")
        if self._clock.monotonic() - self._read_at > TEMPLATE_CACHE:
            self._templates = await self._wanted()
            self._read_at = self._clock.monotonic()
        for ready in self._pool.keep(self._templates):
            self._end(ready)
        editions = {template.edition for template in self._templates}
        self._failures = {key: value for key, value in self._failures.items() if key in editions}
        memory = await self._look()
        plans = self._decided(memory)
        self._pool.set_plans(plans)
        for plan in plans:
            for ready in self._pool.shrink(plan.template, plan.target):
                self._end(ready)
        if not memory.full:
            self._refill(plans)
        return self._next(plans, memory)

    # Decisions

    def _decided(self, memory: MemoryBudget) -> list[PoolPlan]:
        now = self._clock.monotonic()
        wants: list[PoolDemand] = []
        needs: list[int] = []
        levels: dict[Version, Level] = {}
        for template in self._templates:
            least, most = pool_size.limits(template, self._settings.max_size)
            needed = self._need(template)
            # A pool that was just adopted keeps its size for a while.
            size = self._pool.size(template)
            before = self._levels.get(template.edition, Level(size, now))
            before = Level(min(before.target, most), before.since)
            wanted = max(least, min(needed, most))
            level = pool_size.smooth(before, wanted, now, self._pause)
            levels[template.edition] = level
            wants.append(PoolDemand(least, level.target, self._pool.memory(template)))
            needs.append(needed)
        self._levels = levels
        theirs = sum(
            memory.others.get(template.id, 0) * want.memory
            for template, want in zip(self._templates, wants, strict=True)
        )
        granted = pool_size.share_memory(wants, memory.budget - theirs)
        return [
            self._plan(*each, memory)
            for each in zip(self._templates, wants, granted, needs, strict=True)
        ]

    def _need(self, template: Template) -> int:
        stats = self._pool.stats
        return pool_size.need(
            stats.rate(template.id),
            stats.start_seconds(template.id) or START_SECONDS,
            burst=stats.burst(template.id),
            concurrency=CONCURRENCY,
        )

    def _plan(
        self, template: Template, want: PoolDemand, granted: int, needed: int, memory: MemoryBudget
    ) -> PoolPlan:
        most = pool_size.limits(template, self._settings.max_size)[1]
        failure = self._failures.get(template.edition)
        limited = None
        short = self._pool.size(template) < granted
        if short and failure is not None:
            limited = Limit.FAILURES
        elif short and memory.full:
            limited = Limit.MEMORY_FREE
        elif granted < want.target:
            limited = Limit.MEMORY_SHARE
        elif needed > most:
            limited = Limit.MAXIMUM
        return PoolPlan(
            template=template,
            minimum=want.least,
            maximum=most,
            wanted=want.target,
            target=granted,
            limited_by=limited,
            message=failure[2] if limited is Limit.FAILURES and failure is not None else None,
        )

    def _next(self, plans: list[PoolPlan], memory: MemoryBudget) -> float | None:
        """After how many seconds time alone requires another turn."""
        now = self._clock.monotonic()
        # What is due already waits for a slot or is running; its end wakes the loop.
        waits = [retry_at - now for _, retry_at, _ in self._failures.values() if retry_at > now]
        oldest = MAX_AGE
        for plan in plans:
            template_id = plan.template.id
            if plan.wanted > plan.minimum or self._pool.stats.rate(template_id):
                waits.append(self._pause)
            waits += [oldest - age for age in self._pool.ages(plan.template) if age < oldest]
        if memory.full:
            waits.append(FULL_INTERVAL)
        return min(waits, default=None)

    # State

    async def _wanted(self) -> list[Template]:
        found: list[Template] = []
        cursor: str | None = None
        while True:
            page = await self._store.templates.page(cursor=cursor, limit=100)
            for newest in page.items:
                template = await self._ready(newest)
                if template is not None and pool_size.limits(template, self._settings.max_size)[1]:
                    found.append(template)
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _ready(self, newest: Template) -> Template | None:
        if newest.status is TemplateStatus.READY:
            return newest
        return await self._store.templates.ready(newest.id)

    async def _look(self) -> MemoryBudget:
        """The node's memory, and the pools of the other replicas."""
        if self._clock.monotonic() < self._memory.until:
            return self._memory
        metrics = (await self._driver.status()).load
        self._memory = MemoryBudget(
            budget=int(metrics.mem_total * self._settings.memory_share),
            others=await self._pool.on_other_replicas(),
            full=1 - metrics.mem_usage < MEMORY_RESERVE,
            until=self._clock.monotonic() + MEMORY_CACHE,
        )
        return self._memory

    # Actions

    def _refill(self, plans: list[PoolPlan]) -> None:
        while len(self._making) < CONCURRENCY:
            incomplete = [plan for plan in plans if self._missing(plan) > 0]
            if not incomplete:
                return
            # Pools below their minimum first, then the one with the smallest part of its target.
            template = min(incomplete, key=self._fill_order).template
            self._pool.start_begun(template)
            self._begin(self._make(template), self._making)

    def _missing(self, plan: PoolPlan) -> int:
        """Old instances do not count; they are removed when there are enough others."""
        template = plan.template
        failure = self._failures.get(template.edition)
        if failure is not None and failure[1] > self._clock.monotonic():
            return 0
        oldest = MAX_AGE
        young = sum(age < oldest for age in self._pool.ages(template))
        return plan.target - young - self._pool.starting(template)

    def _fill_order(self, plan: PoolPlan) -> tuple[bool, float]:
        there = self._pool.size(plan.template) + self._pool.starting(plan.template)
        return there >= plan.minimum, there / plan.target

    async def _make(self, template: Template) -> None:
        ready = None
        try:
            ready = await self._maker.make(template, template.default_resources)
        except Exception as error:
            known = isinstance(error, AtollError)
            words = str(error) if known else "Internal error. See the server log."
            failures = self._failed(template, words)
            log.warning(
                "pool.refill_failed",
                template_id=template.id,
                error=str(error),
                failures=failures,
                exc_info=None if known else error,
            )
        else:
            self._failures.pop(template.edition, None)
        finally:
            self._pool.start_ended(template, ready)

    def _end(self, ready: ReadyInstance) -> None:
        self._begin(self._ended(ready), self._ending)

    async def _ended(self, ready: ReadyInstance) -> None:
        try:
            async with self._slots:
                await self._pool.destroy(ready)
        except Exception as error:
            # The sweep removes it.
            log.warning("pool.instance_left", instance_id=ready.instance.id, exc_info=error)

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work, name="pool")
        tasks.add(task)

        def done(_: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._pool.wake_refill()

        task.add_done_callback(done)

    def _failed(self, template: Template, words: str) -> int:
        """Schedule a retry; the pools of other templates do not wait."""
        count = self._failures.get(template.edition, (0, 0.0, ""))[0] + 1
        pause = min(FIRST_BACKOFF * 2 ** min(count - 1, 10), MAX_BACKOFF)
        self._failures[template.edition] = (count, self._clock.monotonic() + pause, words)
        return count
