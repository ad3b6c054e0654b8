"""
Warm pools: instances that are ready before a session needs them.

Taking an instance pops it from a list; everything slow was done when it was created. An empty pool
means a cold start, not an error. `reconcile/pool.py` decides the size of each pool, and makes and
destroys instances accordingly.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.service.instances import ReadyInstance, remove_instance
from atoll.service.pool.stats import PoolStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from atoll.drivers.base import Driver
    from atoll.model.instance import Instance
    from atoll.model.pool_size import Limit
    from atoll.model.resources import Resources
    from atoll.model.template import Template
    from atoll.service.replica import Replica

    Version = tuple[str, datetime, int]

CLOSE_CONCURRENCY = 8
"""Instances that are destroyed at the same time when the pool closes."""

RATE_WINDOW = timedelta(seconds=60)
"""Period over which the rate of creates is measured."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How large the pool of a template should be, and why."""

    template: Template
    minimum: int
    maximum: int
    wanted: int
    """Size that the demand requires, within these bounds."""
    target: int
    """The part of it for which the node has memory."""
    limited_by: Limit | None = None
    message: str | None = None
    """Why the last start failed, if it did."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool of one template in this replica."""

    plan: PoolPlan
    ready: int
    starting: int
    others: int
    """Ready instances that other replicas of this node have."""
    rate: float
    """Creates per second."""
    start_seconds: float | None
    memory: int
    """Bytes that the plan reserves for one instance."""
    hits: int
    misses: int
    oldest_seconds: float | None


class Pool:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
    ) -> None:
        self._store = replica.store
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._replica = replica.id
        self._driver = driver
        self._ready: dict[Version, list[ReadyInstance]] = {}
        """Oldest first."""
        self._kept: set[Version] = set()
        self._dead: list[ReadyInstance] = []
        self.stats = PoolStats(self._clock, RATE_WINDOW)
        self._plans: dict[str, PoolPlan] = {}
        self._starting: Counter[Version] = Counter()
        self._changed = asyncio.Event()
        self._templates_changed = False

    def take(self, template: Template, resources: Resources) -> ReadyInstance | None:
        """The newest instance; null if there is none with a disk of this size."""
        if resources.disk != template.default_resources.disk:
            return None
        found = None
        waiting = self._ready.get(template.edition, [])
        while waiting and found is None:
            ready = waiting.pop()
            if ready.link.alive:
                found = ready
            else:
                self._dead.append(ready)
        if template.edition in self._kept:
            self.stats.record_take(template.id, hit=found is not None)
        self.wake_refill()
        return found

    def put(self, template: Template, ready: ReadyInstance) -> None:
        # The refill replaces an instance as soon as it dies.
        ready.link.closed.add_done_callback(lambda _: self.wake_refill())
        waiting = self._ready.setdefault(template.edition, [])
        bisect.insort(waiting, ready, key=lambda other: other.made_at)

    def templates_changed(self) -> None:
        self._templates_changed = True
        self.wake_refill()

    def ages(self, template: Template) -> list[float]:
        """Ages of the ready instances in seconds, the oldest first."""
        now = self._clock.monotonic()
        waiting = self._ready.get(template.edition, [])
        return [now - ready.made_at for ready in waiting if ready.link.alive]

    def size(self, template: Template) -> int:
        return len(self.ages(template))

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (template_id, _, _), waiting in self._ready.items():
            alive = sum(ready.link.alive for ready in waiting)
            sizes[template_id] = sizes.get(template_id, 0) + alive
        return sizes

    def holds(self, instance_id: str) -> bool:
        return any(
            ready.instance.id == instance_id and ready.link.alive
            for waiting in self._ready.values()
            for ready in waiting
        )

    def drop(self, instance_id: str) -> None:
        """Let no session have this instance, which is about to end; the refill replaces it."""
        for waiting in self._ready.values():
            for ready in waiting:
                if ready.instance.id == instance_id:
                    ready.link.close()

    def keep(self, templates: list[Template]) -> list[ReadyInstance]:
        """
        Keep pools of these versions of templates alone. Returns the instances to destroy: those of
        other versions, and dead ones.
        """
        self._kept = {template.edition for template in templates}
        self.stats.keep({template.id for template in templates})
        dropped, self._dead = self._dead, []
        for key in [key for key in self._ready if key not in self._kept]:
            dropped += self._ready.pop(key)
        for key, waiting in self._ready.items():
            dropped += [ready for ready in waiting if not ready.link.alive]
            self._ready[key] = [ready for ready in waiting if ready.link.alive]
        return dropped

    def shrink(self, template: Template, size: int) -> list[ReadyInstance]:
        """Remove the oldest instances above `size`, and return them to be destroyed."""
        waiting = self._ready.get(template.edition, [])
        many = max(0, len(waiting) - size)
        dropped, waiting[:many] = waiting[:many], []
        return dropped

    def memory(self, template: Template) -> int:
        """
        Bytes to reserve for one ready instance: what ready instances were measured to use; the
        template's limit until one was measured, or where the node cannot measure it.
        """
        return self.stats.memory(template.id) or template.default_resources.memory

    async def on_other_replicas(self) -> dict[str, int]:
        """Ready instances that other replicas of this node have, by template."""
        return await self._store.instances.count_unclaimed(
            self._node_id, except_holder=self._replica
        )

    async def on_node(self) -> dict[str, int]:
        """Ready instances of all replicas of this node, by template."""
        return dict(Counter(self.sizes()) + Counter(await self.on_other_replicas()))

    async def adopt(self, template: Template, instance: Instance) -> bool:
        """Take over a ready instance of a lost replica; false if another replica was faster."""
        if not await self._store.instances.claim(
            instance.id, holder=self._replica, previous_holder=instance.holder
        ):
            return False
        link = await self._driver.connect(instance.handle)
        age = (self._clock.now() - instance.created_at).total_seconds()
        made_at = self._clock.monotonic() - max(0.0, age)
        self.put(template, ReadyInstance(instance, link, template.default_resources, made_at))
        return True

    async def destroy(self, ready: ReadyInstance) -> None:
        """Destroy an instance that no session owns, and its workspace."""
        ready.link.close()
        await remove_instance(self._store, self._driver, ready.instance.handle, with_workspace=True)

    async def close(self) -> None:
        slots = asyncio.Semaphore(CLOSE_CONCURRENCY)

        async def destroy(ready: ReadyInstance) -> None:
            async with slots:
                await self.destroy(ready)

        async with asyncio.TaskGroup() as group:
            for ready in self.keep([]):
                group.create_task(destroy(ready))

    # The refill

    def wake_refill(self) -> None:
        """Something has changed that the refill may have to react to."""
        self._changed.set()

    async def wait_for_change(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds; true if something changed since the last true answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        changed = self._changed.is_set()
        self._changed.clear()
        return changed

    def have_templates_changed(self) -> bool:
        """Whether templates have changed since the last call."""
        changed, self._templates_changed = self._templates_changed, False
        return changed

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """By template."""
        return self._plans

    def set_plans(self, plans: Iterable[PoolPlan]) -> None:
        self._plans = {plan.template.id: plan for plan in plans}

    def starting(self, template: Template) -> int:
        """How many instances the refill is starting."""
        return self._starting[template.edition]

    def start_begun(self, template: Template) -> None:
        self._starting[template.edition] += 1

    def start_ended(self, template: Template, ready: ReadyInstance | None) -> None:
        """A start gave a ready instance, or failed."""
        self._starting -= Counter({template.edition: 1})
        if ready is not None:
            self.put(template, ready)

    async def list(self) -> list[PoolStatus]:
        """The pools of this replica, in order of template id."""
        others = await self.on_other_replicas()
        found = []
        for template_id, plan in sorted(self._plans.items()):
            template = plan.template
            ages = self.ages(template)
            hits, misses = self.stats.counts(template_id)
            status = PoolStatus(
                plan=plan,
                ready=len(ages),
                starting=self.starting(template),
                others=others.get(template_id, 0),
                rate=self.stats.rate(template_id),
                start_seconds=self.stats.start_seconds(template_id),
                memory=self.memory(template),
                hits=hits,
                misses=misses,
                oldest_seconds=ages[0] if ages else None,
            )
            found.append(status)
        return found
