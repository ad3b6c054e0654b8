"""
Ready instances, waiting for a session.

Taking one is a pop from a list: whatever takes time was done when it was made. An empty pool is a
cold start, never an error. How many there should be is decided by `reconcile/pool.py`, which makes
and ends them; it tells here what it came to.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from atoll import ids
from atoll.model.instance import Instance, InstanceSpec
from atoll.service.pool.stats import PoolStats

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.demand import Limit
    from atoll.model.instance import Callback
    from atoll.model.resources import Resources
    from atoll.model.session import Warning
    from atoll.model.template import Template
    from atoll.model.volume import Volume, VolumeMount
    from atoll.service.replica import Replica

    Edition = tuple[str, datetime, int]

AT_ONCE = 8
"""Instances that are destroyed at the same time when the pool is closed."""

RATE_WINDOW = timedelta(seconds=60)
"""The time over which the rate of creates is measured."""


@dataclass(frozen=True, slots=True)
class ReadyInstance:
    """An instance with its link, as it has come up."""

    instance: Instance
    link: Link
    resources: Resources
    made_at: float
    """Seconds of the monotonic clock."""
    warnings: tuple[Warning, ...] = ()
    """What its session is to be told of it."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the refill wants a template's pool to be."""

    template: Template
    minimum: int
    maximum: int
    wanted: int
    """What the demand asks for, within these bounds."""
    target: int
    """What of that the node has memory for."""
    limited_by: Limit | None = None
    message: str | None = None
    """What the last start came to that failed."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A template's pool in this control plane."""

    outlook: PoolPlan
    ready: int
    starting: int
    others: int
    """Ready ones of the template that other control planes of this node have."""
    rate: float
    """Creates a second."""
    start_seconds: float | None
    memory: int
    """What each is counted with, in bytes."""
    hits: int
    misses: int
    oldest_seconds: float | None


class TemplateProvider(Protocol):
    async def provide(self, template: Template) -> None:
        """
        Return if this node has all that the template's instances need. Otherwise begin to build it,
        and raise `TemporaryError`.
        """


class Pool:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        builds: TemplateProvider,
        *,
        ephemeral: bool = False,
        callback: Callable[[str], Callback] | None = None,
    ) -> None:
        """`callback` gives the address to which the executor of an instance reports, if any."""
        self._store = replica.store
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._replica = replica.id
        self._driver = driver
        self._builds = builds
        self._ephemeral = ephemeral
        self._callback = callback
        self._ready: dict[Edition, list[ReadyInstance]] = {}
        """Oldest first."""
        self._kept: set[Edition] = set()
        self._dead: list[ReadyInstance] = []
        self.demand = PoolStats(self._clock, RATE_WINDOW)
        self.plans: dict[str, PoolPlan] = {}
        """By template; how the refill sees them."""
        self.starting: Counter[Edition] = Counter()
        """Instances that the refill is making."""
        self.changed = asyncio.Event()
        """Set when there may be something to refill."""
        self.stale = True
        """Whether templates have changed since the refill read them."""

    def take(self, template: Template, resources: Resources) -> ReadyInstance | None:
        """The newest one. A session with another disk than the template's needs one of its own."""
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
            self.demand.taken(template.id, hit=found is not None)
        self.changed.set()
        return found

    def put(self, template: Template, ready: ReadyInstance) -> None:
        # One that dies while it waits is missed at once, not when somebody comes for it.
        ready.link.closed.add_done_callback(lambda _: self.changed.set())
        waiting = self._ready.setdefault(template.edition, [])
        bisect.insort(waiting, ready, key=lambda other: other.made_at)

    def templates_changed(self) -> None:
        """A template was made, changed or removed."""
        self.stale = True
        self.changed.set()

    def ages(self, template: Template) -> list[float]:
        """Of those that wait, in seconds, the oldest first."""
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

    def keep(self, templates: list[Template]) -> list[ReadyInstance]:
        """
        Have pools of these templates as they are now, and of no others. Gives back what is to be
        destroyed: what belongs to others, and what has died.
        """
        self._kept = {template.edition for template in templates}
        self.demand.keep({template.id for template in templates})
        dropped, self._dead = self._dead, []
        for key in [key for key in self._ready if key not in self._kept]:
            dropped += self._ready.pop(key)
        for key, waiting in self._ready.items():
            dropped += [ready for ready in waiting if not ready.link.alive]
            self._ready[key] = [ready for ready in waiting if ready.link.alive]
        return dropped

    def shrink(self, template: Template, size: int) -> list[ReadyInstance]:
        """Take out the oldest of those above `size`, to be destroyed."""
        waiting = self._ready.get(template.edition, [])
        many = max(0, len(waiting) - size)
        dropped, waiting[:many] = waiting[:many], []
        return dropped

    def memory(self, template: Template) -> int:
        """
        What a ready instance is counted with, in bytes: what they were seen to use while they wait,
        and the template's limit until one was seen or where the node cannot tell.
        """
        return self.demand.memory(template.id) or template.default_resources.memory

    async def elsewhere(self) -> dict[str, int]:
        """Ready instances that other control planes of this node have, by template."""
        return await self._store.instances.waiting(self._node_id, besides=self._replica)

    async def on_node(self) -> dict[str, int]:
        """Ready instances of all control planes of this node, by template."""
        return dict(Counter(self.sizes()) + Counter(await self.elsewhere()))

    async def states(self) -> list[PoolStatus]:
        """The pools of this control plane, in order of their templates' ids."""
        others = await self.elsewhere()
        found = []
        for template_id, outlook in sorted(self.plans.items()):
            template = outlook.template
            ages = self.ages(template)
            hits, misses = self.demand.counts(template_id)
            state = PoolStatus(
                outlook=outlook,
                ready=len(ages),
                starting=self.starting[template.edition],
                others=others.get(template_id, 0),
                rate=self.demand.rate(template_id),
                start_seconds=self.demand.start_seconds(template_id),
                memory=self.memory(template),
                hits=hits,
                misses=misses,
                oldest_seconds=ages[0] if ages else None,
            )
            found.append(state)
        return found

    async def make(
        self,
        template: Template,
        resources: Resources,
        *,
        session_id: str | None = None,
        workspace: str | None = None,
        volumes: tuple[tuple[Volume, VolumeMount], ...] = (),
        prefix: str | None = None,
    ) -> ReadyInstance:
        """
        A new instance, recorded and connected; none is left behind when that fails.

        One that is made for a session is recorded as its own from the first, so that nobody who
        finds it after a crash takes it for one of the pool.
        """
        instance_id = ids.instance_id()
        spec = InstanceSpec(
            instance_id,
            template,
            resources,
            workspace,
            self._ephemeral,
            None if self._callback is None else self._callback(instance_id),
            volumes,
            prefix,
        )
        await self._builds.provide(template)
        begun = self._clock.monotonic()
        handle = await self._driver.ensure(spec)
        try:
            instance = Instance(
                id=spec.instance_id,
                node_id=self._node_id,
                template_id=template.id,
                template_version=template.number,
                workspace=self._driver.workspaces.of(handle),
                handle=handle,
                created_at=self._clock.now(),
                session_id=session_id,
                holder=self._replica if session_id is None else None,
            )
            await self._store.instances.add(instance)
            link = await self._driver.connect(handle)
            made_at = self._clock.monotonic()
            if workspace is None:
                # Before anything runs in it, so that of any new one tells what the next will use.
                memory = await self._driver.limits.memory_used(handle)
                seconds = made_at - begun if session_id is None else None
                self.demand.started(template.id, seconds, memory)
        except BaseException:
            await asyncio.shield(self.clear(spec.instance_id, workspace is None))
            raise
        return ReadyInstance(instance, link, resources, made_at)

    async def adopt(self, template: Template, instance: Instance) -> bool:
        """
        Take over an instance that waited in the pool of a replica that is lost; False when somebody
        else did.
        """
        if not await self._store.instances.claim(
            instance.id, holder=self._replica, instead_of=instance.holder
        ):
            return False
        link = await self._driver.connect(instance.handle)
        age = (self._clock.now() - instance.created_at).total_seconds()
        made_at = self._clock.monotonic() - max(0.0, age)
        self.put(template, ReadyInstance(instance, link, template.default_resources, made_at))
        return True

    async def clear(self, instance_id: str, workspace_too: bool) -> None:
        """Remove an instance from the node and the store."""
        for handle in await self._driver.handles():
            if handle.instance_id == instance_id:
                await self._driver.destroy(handle)
                if workspace_too:
                    await self._driver.workspaces.discard(self._driver.workspaces.of(handle))
        await self._store.instances.remove(instance_id)

    async def destroy(self, ready: ReadyInstance) -> None:
        """End an instance that no session owns, and its workspace."""
        ready.link.close()
        await self._driver.destroy(ready.instance.handle)
        await self._driver.workspaces.discard(ready.instance.workspace)
        await self._store.instances.remove(ready.instance.id)

    async def close(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def end(ready: ReadyInstance) -> None:
            async with slots:
                await self.destroy(ready)

        async with asyncio.TaskGroup() as group:
            for ready in self.keep([]):
                group.create_task(end(ready))
