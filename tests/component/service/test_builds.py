"""Builds: which faults are tried again and when, and what no template needs any more."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.blobs.local import LocalBlobs
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.errors import Conflict, TemporaryError
from atoll.model.template import Build, Layer, Template, TemplateStatus
from atoll.reconcile.builds import BuildReconciler
from atoll.reconcile.layers import ORPHAN_AGE, LayerSweep
from atoll.service.background import BackgroundTasks
from atoll.service.packages.service import Packages
from atoll.service.replica import Replica
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from atoll.stores.stale_cache import CachingStore
from atoll.testing import ManualClock
from tests.contract.stores.store_entities import make_session
from tests.parts import templates_on
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

PENDING, READY, FAILED = TemplateStatus.PENDING, TemplateStatus.READY, TemplateStatus.FAILED


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Site:
    clock: ManualClock
    store: SqlStore
    driver: LocalDriver
    templates: Templates
    builds: Builds
    leases: Leases
    loop: BuildReconciler
    sweep: LayerSweep
    tasks: BackgroundTasks

    async def pass_by(self, seconds: float) -> None:
        self.clock.time += seconds
        await self.leases.heartbeat()

    async def built(self) -> None:
        """Start due builds and wait for their end."""
        await self.loop.once()
        await settled()

    def template(self, *packages: str) -> Template:
        now = self.clock.now()
        build = Build(python_packages=packages) if packages else None
        resources = self.templates.base_resources
        return Template("t", "T", now, now, resources, build=build)

    async def get(self) -> Template:
        return await self.templates.get("t")


async def settled() -> None:
    """Wait for all running builds."""
    while builds := [task for task in asyncio.all_tasks() if task.get_name().startswith("build ")]:
        await asyncio.wait(builds)


@asynccontextmanager
async def site(place: Path, index_url: str, **options: object) -> AsyncIterator[Site]:
    settings = Settings.model_validate(
        {"data_dir": place, "packages": {"index_url": index_url}, "template": options}
    )
    clock, tasks = ManualClock(), BackgroundTasks()
    url = f"sqlite:///{place / 'atoll.db'}"
    store = SqlStore([url], sqlite=settings.sqlite, database=settings.database)
    coordination = MemoryCoordination("me", settings.coordination, timedelta(hours=1), clock)
    driver = LocalDriver(place, settings.local, settings.link, packages=settings.packages)
    leases = Leases(coordination, clock, settings.coordination)
    await store.open()
    await coordination.open()
    await leases.start()
    await driver.open()
    blobs = LocalBlobs(place / "blobs")
    replica = Replica(
        "local", CachingStore(store, clock, settings.recall), coordination, leases, tasks, clock
    )
    templates = templates_on(replica, driver, blobs, settings)
    packages = Packages(driver, leases, clock, settings.packages, await store.secret(), "local")
    builds = Builds(replica, driver, templates, packages, settings.template)
    loop = BuildReconciler(replica, builds, settings.template)
    sweep = LayerSweep(replica, driver, builds, settings.template)
    try:
        yield Site(clock, store, driver, templates, builds, leases, loop, sweep, tasks)
        await tasks.settle(30)
    finally:
        await driver.close()
        await coordination.close()
        await store.close()


@pytest.mark.slow
async def test_a_temporary_fault_is_retried_with_growing_delays(
    bubblewrap: str, tmp_path: Path, nowhere: str
) -> None:
    async with site(tmp_path, f"{nowhere}/simple", build_retries=2) as here:
        await here.templates.create(here.template("greet"))
        for attempt in (1, 2):
            await here.built()
            template = await here.get()
            assert template.build is not None
            assert template.status is PENDING
            assert template.build.attempts == attempt
            assert template.build.retry_at == here.clock.now() + timedelta(seconds=attempt)

            await here.pass_by(attempt - 0.5)
            assert await here.loop.once() == timedelta(seconds=0.5)
            await settled()
            assert await here.get() == template
            await here.pass_by(0.5)
        await here.built()

        template = await here.get()
        assert template.status is FAILED
        assert template.build is not None
        assert "Gave up after 3 attempts" in (template.build.message or "")
        log = (await here.builds.log("t")).decode()
        assert [f"Attempt {n} to build" in log for n in (1, 2, 3)] == [True] * 3
        with pytest.raises(Conflict, match="Gave up") as caught:
            await here.templates.ready("t")
        assert caught.value.code == "template_not_ready"


async def test_a_build_of_a_dead_replica_is_continued_by_the_next(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0")
        async with site(tmp_path, index.url) as here:
            made = await here.templates.create(here.template("greet"))
            await here.store.templates.save(replace(made, status=TemplateStatus.BUILDING))

            await here.built()

            template = await here.get()
            assert template.status is READY
            assert template.build is not None
            assert template.build.installed == ("greet==1.0",)


async def test_a_version_replaced_before_its_build_is_abandoned(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0")
        async with site(tmp_path, index.url) as here:
            await here.templates.create(here.template("nothing-of-the-kind"))
            await here.templates.replace(here.template("greet"))

            await here.built()

            first = await here.templates.numbered("t", 1)
            assert first.status is FAILED
            assert first.build is not None
            assert "Superseded by version 2" in (first.build.message or "")
            assert (await here.templates.ready("t")).number == 2


async def test_a_change_that_needs_no_build_is_ready_at_once(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0").add("greet", "2.0")
        async with site(tmp_path, index.url) as here:
            await here.templates.create(here.template("greet==1.0"))
            await here.built()

            other = replace(here.template("greet==1.0"), env={"A": "1"})
            assert (await here.templates.replace(other)).status is READY
            assert (await here.templates.replace(here.template("greet==2.0"))).status is PENDING


async def test_a_node_without_a_build_of_another_node_repeats_it(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0")
        async with site(tmp_path, index.url) as here:
            await here.templates.create(here.template("greet"))
            await here.built()
            template = await here.templates.ready("t")
            assert template.build is not None
            assert template.build.environment is not None
            await here.builds.provide(template)
            ages = datetime(2999, 1, 1, tzinfo=UTC)
            name = template.build.environment
            assert await here.driver.packages.remove(name, unless_used_since=ages)

            with pytest.raises(TemporaryError) as caught:
                await here.builds.provide(template)
            assert caught.value.code == "template_not_here"
            await here.tasks.settle(30)
            await here.builds.provide(template)


async def test_the_sweep_removes_unused_layers_and_versions(
    bubblewrap: str, tmp_path: Path
) -> None:
    async with site(tmp_path, "http://127.0.0.1:1/simple", versions=2) as here:
        names = [str(n) * 40 for n in range(6)]
        for name in names:
            os.makedirs(tmp_path / "node" / "layers" / name / "usr")
        template = here.template()
        for n, name in enumerate(names[:5]):
            build = Build(root="/nowhere", layers=(Layer(name, ("x",)),))
            version = replace(template, build=build, status=PENDING if n == 4 else READY)
            if n == 0:
                await here.store.templates.add(version)
            else:
                newest = await here.get()
                await here.store.templates.supersede(newest, version)
        await here.store.sessions.add(make_session(template_id="t", template_version=2))

        await here.sweep.once()
        assert await here.driver.images.names() == names
        await here.pass_by(ORPHAN_AGE)
        await here.sweep.once()

        # Of the session, the last that is ready, and the newest.
        assert await here.driver.images.names() == [names[1], names[3], names[4]]
        left = [found.number for found in await here.store.templates.before("t")]
        assert left == [4, 2]
