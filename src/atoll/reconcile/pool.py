"""
Keeps the warm pools as large as the demand asks for.

A pool grows with the creates of the last minute and shrinks when they end; all pools of a node
together stay within a share of its memory. New instances are made before old ones go. What is made
or ended does not hold up the look at the rest: a template that starts slowly, or not at all, keeps
no other one waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
    from atoll.service.pool.service import Pool, ReadyInstance, Version
    from atoll.settings import PoolSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

FIRST_BACKOFF = 2.0
MAX_BACKOFF = 60.0
STEPS = 4
"""A pool that is larger than wanted is lowered so often in a window."""
ROOM_SECONDS = 1.0
"""How long what is known of the node's memory holds."""
TEMPLATE_SECONDS = 10.0
"""How long templates are not read again, unless one is said to have changed."""
FULL_SECONDS = 5.0
"""When a node that had too little memory is looked at again."""

CONCURRENCY = 2
"""Instances that are started at the same time."""
MAX_AGE = 3600.0
"""Seconds after which a ready instance is replaced."""
MEMORY_RESERVE = 0.05
"""Share of the node's memory that must be free before another instance is started."""


@dataclass(frozen=True)
class Room:
    """What the node has for ready instances."""

    budget: int
    """Bytes, for those of all its control planes."""
    others: dict[str, int]
    """What the other ones have, by template."""
    full: bool
    """Whether it has too little memory left for any other."""
    until: float


class PoolRefill:
    def __init__(
        self, pool: Pool, store: Store, driver: Driver, settings: PoolSettings, clock: Clock
    ) -> None:
        self._pool = pool
        self._store = store
        self._driver = driver
        self._settings = settings
        self._clock = clock
        self._pause = RATE_WINDOW.total_seconds() / STEPS
        self._failures: dict[Version, tuple[int, float, str]] = {}
        """How often in a row an edition could not be started, when it is tried again, and why."""
        self._levels: dict[Version, Level] = {}
        self._templates: list[Template] = []
        self._read_at = 0.0
        self._room = Room(0, {}, full=False, until=0.0)
        self._making: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def run(self) -> None:
        """Look whenever something was taken, made or changed, and when time alone changes it."""
        try:
            while True:
                self._pool.changed.clear()
                try:
                    wait = await self.turn()
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
        finally:
            for task in self._making:
                task.cancel()
            await asyncio.gather(*self._making, *self._ending, return_exceptions=True)

    async def turn(self) -> float | None:
        """Begin what is to be done; in how many seconds to look again, if something may change."""
        if self._pool.stale or self._clock.monotonic() - self._read_at > TEMPLATE_SECONDS:
            self._pool.stale = False
            try:
                self._templates = await self._wanted()
            except BaseException:
                self._pool.stale = True
                raise
            self._read_at = self._clock.monotonic()
        for ready in self._pool.keep(self._templates):
            self._end(ready)
        editions = {template.edition for template in self._templates}
        self._failures = {key: value for key, value in self._failures.items() if key in editions}
        room = await self._look()
        plans = self._decided(room)
        self._pool.plans = {plan.template.id: plan for plan in plans}
        for plan in plans:
            for ready in self._pool.shrink(plan.template, plan.target):
                self._end(ready)
        if not room.full:
            self._refill(plans)
        return self._next(plans, room)

    # Decisions

    def _decided(self, room: Room) -> list[PoolPlan]:
        now = self._clock.monotonic()
        wants: list[PoolDemand] = []
        needs: list[int] = []
        levels: dict[Version, Level] = {}
        for template in self._templates:
            least, most = pool_size.limits(template, self._settings.max_size)
            needed = self._need(template)
            # One that has just been adopted is as large as it was for a while.
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
            room.others.get(template.id, 0) * want.memory
            for template, want in zip(self._templates, wants, strict=True)
        )
        granted = pool_size.share_memory(wants, room.budget - theirs)
        return [
            self._plan(*each, room)
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
        self, template: Template, want: PoolDemand, granted: int, needed: int, room: Room
    ) -> PoolPlan:
        most = pool_size.limits(template, self._settings.max_size)[1]
        failure = self._failures.get(template.edition)
        limited = None
        short = self._pool.size(template) < granted
        if short and failure is not None:
            limited = Limit.FAILURES
        elif short and room.full:
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

    def _next(self, plans: list[PoolPlan], room: Room) -> float | None:
        """When the passing of time alone calls for another look."""
        now = self._clock.monotonic()
        # What is due waits for a place, or is under way: its end is told.
        waits = [retry_at - now for _, retry_at, _ in self._failures.values() if retry_at > now]
        oldest = MAX_AGE
        for plan in plans:
            template_id = plan.template.id
            if plan.wanted > plan.minimum or self._pool.stats.rate(template_id):
                waits.append(self._pause)
            waits += [oldest - age for age in self._pool.ages(plan.template) if age < oldest]
        if room.full:
            waits.append(FULL_SECONDS)
        return min(waits, default=None)

    # What is there

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

    async def _look(self) -> Room:
        """The node's memory, and what other control planes have of it in their pools."""
        if self._clock.monotonic() < self._room.until:
            return self._room
        metrics = (await self._driver.status()).load
        self._room = Room(
            budget=int(metrics.mem_total * self._settings.memory_share),
            others=await self._pool.on_other_replicas(),
            full=1 - metrics.mem_usage < MEMORY_RESERVE,
            until=self._clock.monotonic() + ROOM_SECONDS,
        )
        return self._room

    # What is done

    def _refill(self, plans: list[PoolPlan]) -> None:
        while len(self._making) < CONCURRENCY:
            lacking = [plan for plan in plans if self._lack(plan) > 0]
            if not lacking:
                return
            # Minimums first, then whoever has the smallest part of what it should have.
            template = min(lacking, key=self._standing).template
            self._pool.starting[template.edition] += 1
            self._begin(self._make(template), self._making)

    def _lack(self, plan: PoolPlan) -> int:
        """Those that are old do not count, and go when there are enough others."""
        template = plan.template
        failure = self._failures.get(template.edition)
        if failure is not None and failure[1] > self._clock.monotonic():
            return 0
        oldest = MAX_AGE
        young = sum(age < oldest for age in self._pool.ages(template))
        return plan.target - young - self._pool.starting[template.edition]

    def _standing(self, plan: PoolPlan) -> tuple[bool, float]:
        edition = plan.template.edition
        there = self._pool.size(plan.template) + self._pool.starting[edition]
        return there >= plan.minimum, there / plan.target

    async def _make(self, template: Template) -> None:
        try:
            ready = await self._pool.make(template, template.default_resources)
        except Exception as error:
            known = isinstance(error, AtollError)
            words = str(error) if known else "It broke; the server's log tells more."
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
            self._pool.put(template, ready)
        finally:
            self._pool.starting -= Counter({template.edition: 1})

    def _end(self, ready: ReadyInstance) -> None:
        self._begin(self._ended(ready), self._ending)

    async def _ended(self, ready: ReadyInstance) -> None:
        try:
            async with self._slots:
                await self._pool.destroy(ready)
        except Exception as error:
            # The sweep finds it.
            log.warning("pool.instance_left", instance_id=ready.instance.id, exc_info=error)

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work, name="pool")
        tasks.add(task)

        def done(_: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._pool.changed.set()

        task.add_done_callback(done)

    def _failed(self, template: Template, words: str) -> int:
        """Put off: the pools of other templates do not wait for one that cannot be started."""
        count = self._failures.get(template.edition, (0, 0.0, ""))[0] + 1
        pause = min(FIRST_BACKOFF * 2 ** min(count - 1, 10), MAX_BACKOFF)
        self._failures[template.edition] = (count, self._clock.monotonic() + pause, words)
        return count
