"""The refill, step by step, on a node whose starts the test controls."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.base import NodeStatus
from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.limits import LocalLimits
from atoll.drivers.local.workspaces import LocalWorkspaces
from atoll.errors import TemporaryError
from atoll.model.instance import Handle
from atoll.model.node import NodeMetrics
from atoll.model.pool_size import Limit
from atoll.reconcile import pool
from atoll.reconcile.pool import FULL_INTERVAL, MEMORY_CACHE, PoolRefill
from atoll.service.instances import InstanceMaker
from atoll.service.pool.service import Pool, PoolPlan
from atoll.settings import PoolSettings, Settings
from atoll.stores.sql.store import SqlStore
from tests.component.reconcile.test_strays import ManualClock
from tests.contract.stores.store_entities import make_instance, make_template
from tests.parts import NothingToBuild, replica_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link
    from atoll.model.instance import InstanceSpec
    from atoll.model.template import Template

pytestmark = pytest.mark.anyio

ME = "replica-me"
MiB = 2**20


class Line:
    """The other end of a link."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self.closed.done()

    def close(self) -> None:
        if self.alive:
            self.closed.set_result(None)


class Node(LocalDriver):
    def __init__(self, place: Path, settings: Settings) -> None:
        super().__init__(place, settings.local, settings.link)
        self.lines: dict[str, Line] = {}
        self.made: list[str] = []
        """Templates, in order."""
        self.slow: dict[str, asyncio.Event] = {}
        self.stuck = 0
        self.broken: set[str] = set()
        self.total, self.usage = 1000 * MiB, 0.5
        self.idle: int | None = 10 * MiB
        self.workspaces, self.limits = NodeWorkspaces(), NodeLimits(self)

    async def ensure(self, spec: InstanceSpec) -> Handle:
        if spec.template.id in self.slow:
            self.stuck += 1
            try:
                await self.slow[spec.template.id].wait()
            finally:
                self.stuck -= 1
        if spec.template.id in self.broken:
            raise TemporaryError("It does not start.")
        self.lines[spec.instance_id] = Line()
        self.made.append(spec.template.id)
        return Handle(spec.instance_id, "local", 1, {"workspace": f"ws-{spec.instance_id}"})

    async def connect(self, handle: Handle) -> Link:
        return cast("Link", self.lines[handle.instance_id])

    async def destroy(self, handle: Handle) -> None:
        del self.lines[handle.instance_id]

    async def status(self) -> NodeStatus:
        return NodeStatus(None, NodeMetrics(0.0, self.usage, 0, 2, self.total, 0.0))


class NodeWorkspaces(LocalWorkspaces):
    def __init__(self) -> None: ...

    async def discard(self, name: str) -> None: ...


class NodeLimits(LocalLimits):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def memory_used(self, handle: Handle) -> int | None:
        return self.node.idle


class Environment:
    def __init__(
        self,
        node: Node,
        store: SqlStore,
        clock: ManualClock,
        pool: Pool,
        maker: InstanceMaker,
        refill: PoolRefill,
    ) -> None:
        self.node = node
        self.store = store
        self.clock = clock
        self.pool = pool
        self.maker = maker
        self.refill = refill

    async def add(self, **fields: Any) -> Template:
        template = make_template(**fields)
        await self.store.templates.add(template)
        self.pool.templates_changed()
        return template

    async def settle(self) -> float | None:
        """Turns until there is nothing to do that does not take time; when to look again."""
        while True:
            await self.pool.wait_for_change(0)
            wait = await self.refill.turn()
            changed = False
            # A hanging start changes nothing.
            while self._busy() and not changed:
                changed = await self.pool.wait_for_change(0.001)
            await asyncio.sleep(0)  # What has ended wakes the refill a moment later.
            if not (await self.pool.wait_for_change(0) or changed):
                return wait

    def _busy(self) -> bool:
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "pool"]
        return len(tasks) > self.node.stuck

    def burst(self, template: Template, many: int) -> None:
        for _ in range(many):
            ready = self.pool.take(template, template.default_resources)
            if ready is not None:
                self.node.lines.pop(ready.instance.id)  # A session has it.

    def plan(self, template: Template) -> PoolPlan:
        return self.pool.plans[template.id]

    def pass_time(self, seconds: float) -> None:
        self.clock.time += timedelta(seconds=seconds)


@asynccontextmanager
async def environment(place: Path, **options: Any) -> AsyncIterator[Environment]:
    settings, clock = Settings(data_dir=place, pool=PoolSettings(**options)), ManualClock()
    node = Node(place, settings)
    store = SqlStore(
        [f"sqlite:///{place / 'atoll.db'}"], sqlite=settings.sqlite, database=settings.database
    )
    await store.open()
    leases = Leases(
        MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock),
        clock,
        settings.coordination,
    )
    replica = replica_on(store, leases, clock, "local")
    pool = Pool(replica, node)
    maker = InstanceMaker(replica, node, NothingToBuild(), pool.stats)
    refill = PoolRefill(pool, maker, store, node, settings.pool, clock)
    try:
        yield Environment(node, store, clock, pool, maker, refill)
    finally:
        making = [task for task in asyncio.all_tasks() if task.get_name() == "pool"]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        await store.close()


async def test_without_demand_a_pool_has_its_minimum_and_the_refill_sleeps(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=3)
        assert await found.settle() == timedelta(hours=1).total_seconds()
        assert found.pool.sizes() == {template.id: 3}


async def test_a_template_without_a_pool_gets_none(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=0)
        await found.settle()
        found.burst(template, 5)
        assert await found.settle() is None
        assert found.node.made == []


async def test_a_pool_without_a_minimum_exists_only_during_demand(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=0, pool_max=4)
        await found.settle()
        assert found.pool.sizes().get(template.id, 0) == 0
        found.burst(template, 3)
        # A cold start provides the first measurement of an instance.
        cold = await found.maker.make(template, template.default_resources, session_id="sess_1")
        del found.node.lines[cold.instance.id]
        await found.settle()
        assert found.pool.size(template) == 3
        for _ in range(12):
            found.pass_time(15)
            await found.settle()
        assert found.pool.size(template) == 0
        assert found.node.lines == {}


async def test_a_burst_grows_a_pool_and_inactivity_shrinks_it(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=2)
        await found.settle()
        found.burst(template, 10)
        wait = await found.settle()
        assert found.pool.size(template) == 10
        assert wait == 15
        sizes = []
        for _ in range(10):
            found.pass_time(15)
            await found.settle()
            sizes.append(found.pool.size(template))
        assert sizes == [10, 10, 10, 6, 4, 3, 2, 2, 2, 2]
        assert len(found.node.lines) == 2
        assert [state.misses for state in await found.pool.list()] == [8]


async def test_the_oldest_instances_are_removed_first(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=2)
        await found.settle()
        found.pass_time(30)
        old = set(found.node.lines)
        for _ in range(4):
            found.pool.stats.record_take(template.id, hit=True)
        await found.settle()
        assert found.pool.size(template) == 4
        for _ in range(10):
            found.pass_time(15)
            await found.settle()
        assert len(found.node.lines) == 2
        assert not old & set(found.node.lines)


async def test_a_pool_stays_below_its_maximum_and_reports_that(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=1, pool_max=4)
        await found.settle()
        found.burst(template, 20)
        await found.settle()
        assert found.pool.size(template) == 4
        assert found.plan(template).limited_by is Limit.MAXIMUM


async def test_pools_share_the_memory_with_each_other(tmp_path: Path) -> None:
    # 250 MiB: 25 of 10 MiB, of which 4 and 1 are minimums.
    async with environment(tmp_path) as found:
        one, other = await found.add(pool_size=4), await found.add(pool_size=1)
        await found.settle()
        found.burst(one, 30)
        found.burst(other, 30)
        await found.settle()
        assert found.pool.sizes() == {one.id: 14, other.id: 11}
        assert found.plan(one).limited_by is Limit.MEMORY_SHARE
        assert found.plan(one).wanted == 30


async def test_pools_share_the_memory_with_other_control_planes_of_the_node(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=1)
        for _ in range(20):
            await found.store.instances.add(
                make_instance(template_id=template.id, holder="replica-other")
            )
        await found.settle()
        found.burst(template, 30)
        await found.settle()
        assert found.pool.size(template) == 5
        (state,) = await found.pool.list()
        assert (state.ready, state.others, state.memory) == (5, 20, 10 * MiB)


async def test_an_instance_without_a_measurement_counts_with_its_limit(tmp_path: Path) -> None:
    async with environment(tmp_path, memory_share=1.0) as found:
        found.node.idle = None
        found.node.total = 4 * 512 * MiB
        template = await found.add(pool_size=1)
        await found.settle()
        found.burst(template, 30)
        await found.settle()
        assert found.pool.size(template) == 4


async def test_a_node_with_little_free_memory_is_not_filled(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        found.node.usage = 0.97
        template = await found.add(pool_size=2)
        assert await found.settle() == FULL_INTERVAL
        assert found.pool.size(template) == 0
        assert found.plan(template).limited_by is Limit.MEMORY_FREE
        found.node.usage = 0.5
        found.pass_time(FULL_INTERVAL + MEMORY_CACHE)
        await found.settle()
        assert found.pool.size(template) == 2
        assert found.plan(template).limited_by is None


async def test_old_instances_are_replaced_without_the_pool_becoming_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{pool.__name__}.MAX_AGE", 100.0)
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=3)
        assert await found.settle() == 100
        first = set(found.node.lines)
        found.pass_time(100)
        found.node.slow[template.id] = asyncio.Event()
        await found.refill.turn()
        assert set(found.node.lines) == first  # None is removed before another is ready.
        found.node.slow.pop(template.id).set()
        await found.settle()
        assert found.pool.size(template) == 3
        assert not first & set(found.node.lines)
        assert len(found.node.made) == 6


async def test_a_dead_instance_is_removed_and_replaced(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=2)
        await found.settle()
        dead = next(iter(found.node.lines))
        found.node.lines[dead].close()
        assert found.pool.size(template) == 1
        await found.settle()
        assert found.pool.size(template) == 2
        assert dead not in found.node.lines
        assert len(await found.store.instances.all()) == 2


async def test_dead_instances_are_skipped_when_one_is_taken(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=2)
        await found.settle()
        newest = list(found.node.lines)[-1]
        found.node.lines[newest].close()
        ready = found.pool.take(template, template.default_resources)
        assert ready is not None
        assert ready.instance.id != newest
        await found.settle()
        assert newest not in found.node.lines


async def test_a_changed_template_empties_its_pool_even_during_a_start(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=2)
        await found.settle()
        old = set(found.node.lines)
        found.node.slow[template.id] = asyncio.Event()
        found.burst(template, 1)
        await found.refill.turn()
        assert found.pool.starting(template) == 1
        changed = await found.store.templates.supersede(template, replace(template, name="new"))
        found.pool.templates_changed()
        assert found.pool.take(changed, changed.default_resources) is None
        await found.refill.turn()
        assert found.pool.size(template) == 0
        found.node.slow.pop(template.id).set()
        await found.settle()
        assert found.pool.size(changed) == 2
        assert len(found.node.lines) == 2
        assert not old & set(found.node.lines)
        recorded = [each for each in await found.store.instances.all() if each.template_version > 1]
        assert {each.id for each in recorded} == set(found.node.lines)


async def test_a_changed_template_starts_with_the_current_demand(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=4)
        await found.settle()
        found.burst(template, 3)
        await found.settle()
        smaller = replace(template, pool_size=1)
        changed = await found.store.templates.supersede(template, smaller)
        found.pool.templates_changed()
        await found.settle()
        assert found.pool.sizes() == {template.id: 3}
        assert found.plan(changed).minimum == 1


async def test_a_slow_template_does_not_delay_others(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        slow = await found.add(id="a-slow", pool_size=1)
        found.node.slow[slow.id] = asyncio.Event()
        quick = await found.add(id="b-quick", pool_size=3)
        await found.settle()
        assert found.pool.sizes() == {quick.id: 3}


async def test_a_template_that_does_not_start_is_retried_with_growing_delays(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=1)
        found.node.broken.add(template.id)
        waits = []
        for _ in range(7):
            wait = await found.settle()
            assert wait is not None
            waits.append(wait)
            found.pass_time(wait)
        assert waits == [2, 4, 8, 16, 32, 60, 60]
        plan = found.plan(template)
        assert (plan.limited_by, plan.message) == (Limit.FAILURES, "It does not start.")
        found.node.broken.clear()
        await found.settle()
        assert found.pool.size(template) == 1
        assert found.plan(template).limited_by is None


async def test_a_session_with_another_disk_does_not_count_as_demand(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        template = await found.add(pool_size=1)
        await found.settle()
        other = replace(template.default_resources, disk=MiB)
        for _ in range(5):
            assert found.pool.take(template, other) is None
        await found.settle()
        (state,) = await found.pool.list()
        assert (state.ready, state.hits, state.misses, state.rate) == (1, 0, 0, 0.0)
