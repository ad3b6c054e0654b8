"""Sets of packages on a node: installed once, remembered, made again, and removed when unused."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.clock import SystemClock
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.errors import Conflict
from atoll.model.install import Dependency, Install, InstallStatus
from atoll.model.packages import Interpreter
from atoll.model.session import SessionStatus
from atoll.model.template import DEFAULT_TEMPLATE, Template
from atoll.reconcile.packages import ORPHAN_AGE, PackageSweep
from atoll.service.packages.service import Packages
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from tests.contract.drivers.conftest import template
from tests.contract.stores.store_entities import make_session
from tests.parts import replica_on
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from datetime import datetime
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("bubblewrap")]

TEMPLATE = template()
MiB = 1024 * 1024


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as running:
        yield running.add("one", "1.0").add("two", "1.0", requires=["one"])


class ShiftedClock(SystemClock):
    """The system's, moved on by the test."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.ahead


class World:
    def __init__(self, packages: Packages, driver: LocalDriver, clock: ShiftedClock) -> None:
        self.packages = packages
        self.driver = driver
        self.clock = clock

    async def install(self, *names: str, timeout: int = 60, **about: Any) -> Install:
        """As a session that is created has them."""
        dependencies = tuple(Dependency(*name.split(" ")) for name in names)
        install = Install(dependencies, timeout, **about)
        install = await self.packages.begin(install, TEMPLATE)
        if install.status is InstallStatus.INSTALLING:
            install = await self.packages.install("sess_1", install, TEMPLATE)
        return install


@asynccontextmanager
async def world(place: Path, index: Index, **options: Any) -> AsyncIterator[World]:
    settings = Settings(data_dir=place, packages={"index_url": index.url, **options})
    clock = ShiftedClock()
    coordination = MemoryCoordination("me", settings.coordination, timedelta(hours=1), clock)
    leases = Leases(coordination, clock, settings.coordination)
    driver = LocalDriver(place, settings.local, settings.link)
    await coordination.open()
    await leases.start()
    await driver.open()
    try:
        yield World(
            Packages(driver, leases, clock, settings.packages, "secret", "local"), driver, clock
        )
        assert list((place / "node" / "installs").iterdir()) == []
    finally:
        await driver.close()
        await coordination.close()


async def test_a_set_is_installed_once_and_reused_after_a_restart(
    index: Index, tmp_path: Path
) -> None:
    async with world(tmp_path, index) as found:
        first = await found.install("two")
        assert first.installed == ("one==1.0", "two==1.0")
        asked = len(index.asked)
        assert await found.install("two") == first
    async with world(tmp_path, index) as found:
        assert await found.install("two") == first
        # Another set that resolves to the same packages uses the same directory.
        again = await found.install("one", "two ==1.0")
        assert (again.environment, len(index.asked) > asked) == (first.environment, True)


async def test_a_set_with_open_versions_is_resolved_again_after_a_day(
    index: Index, tmp_path: Path
) -> None:
    async with world(tmp_path, index) as found:
        before, pinned = await found.install("one"), await found.install("one ==1.0")
        index.add("one", "2.0")
        assert (await found.install("one")).installed == ("one==1.0",)
        found.clock.ahead = timedelta(hours=25)
        after = await found.install("one")
        assert after.installed == ("one==2.0",)
        assert after.environment != before.environment
        asked = len(index.asked)
        assert await found.install("one ==1.0") == pinned
        assert len(index.asked) == asked


async def test_an_installation_that_times_out_leaves_nothing(index: Index, tmp_path: Path) -> None:
    async with world(tmp_path, index) as found:
        held = index.hold("/simple/one/")
        for seconds in (1, 5, 25):
            failed = await found.install("one", timeout=seconds)
            assert failed.status is InstallStatus.FAILED
            assert failed.message == f"The packages were not installed within {seconds} seconds."
            assert await found.driver.packages.listed() == []
            if held.asked.is_set():  # Else the time was over before it had begun.
                break
        assert held.asked.is_set()
        assert b"Looking for one" in await found.packages.log("sess_1")
        held.go.set()
        assert (await found.install("one")).status is InstallStatus.INSTALLED


async def test_an_installation_continues_for_the_request_with_the_longer_timeout(
    index: Index, tmp_path: Path
) -> None:
    async with world(tmp_path, index) as found:
        held = index.hold("/simple/one/")
        async with asyncio.TaskGroup() as group:
            hasty = group.create_task(found.install("one", timeout=2))
            patient = group.create_task(found.install("one", timeout=60))
            assert (await hasty).status is InstallStatus.FAILED
            held.go.set()
            assert (await patient).status is InstallStatus.INSTALLED
        assert index.asked.count("/files/one-1.0-py3-none-any.whl") == 1


async def test_a_cancelled_installation_leaves_nothing(index: Index, tmp_path: Path) -> None:
    async with world(tmp_path, index) as found:
        held = index.hold("/simple/one/")
        installing = asyncio.create_task(found.install("one"))
        await asyncio.to_thread(held.asked.wait, 30)
        installing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await installing


async def test_leftovers_of_a_dead_process_are_removed(index: Index, tmp_path: Path) -> None:
    left = tmp_path / "node" / "installs" / "install_0000"
    left.mkdir(parents=True)
    (left / "owner").write_text("999999999 1")
    (left / "build").mkdir()
    async with world(tmp_path, index) as found:
        assert not left.exists()
        assert found.driver.packages


async def test_packages_are_installed_again_on_a_node_without_them(
    index: Index, tmp_path: Path
) -> None:
    async with world(tmp_path / "a", index) as found:
        first = await found.install("two")
    index.add("one", "2.0")
    async with world(tmp_path / "b", index) as found:
        await found.packages.ensure("sess_1", first, TEMPLATE)
        name = first.environment
        assert name is not None
        assert await found.driver.packages.use(name)
        directory = tmp_path / "b" / "node" / "packages" / name
        assert "1.0" in (directory / "one.py").read_text()


async def test_all_parts_of_a_wheel_are_in_their_usual_directories(
    index: Index, tmp_path: Path
) -> None:
    data = "with_parts-1.0.data"
    index.add(
        "with-parts",
        files={
            f"{data}/scripts/tool.py": "#!python\nprint('a tool')\n",
            f"{data}/scripts/plain": "#!/bin/sh\necho plain\n",
            f"{data}/data/share/doc.txt": "a text",
            f"{data}/headers/parts.h": "a header",
            f"{data}/purelib/with_parts_more.py": "more = 1",
            "with_parts_data/__init__.py": "",
        },
        scripts={"say": "with_parts:main"},
    )
    async with world(tmp_path, index) as found:
        done = await found.install("with-parts")
        assert done.message is None
        assert done.environment is not None
        directory = found.driver.packages.directory / done.environment
        there = {
            str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
        }
        assert there >= {
            "with_parts.py", "with_parts_more.py", "with_parts_data/__init__.py", "share/doc.txt",
            "include/with-parts/parts.h", "bin/tool.py", "bin/plain", "bin/say",
            "with_parts-1.0.dist-info/RECORD", "with_parts-1.0.dist-info/entry_points.txt",
        }  # fmt: skip
        assert not [path for path in there if ".data" in path]
        assert any(path.startswith("__pycache__/with_parts.") for path in there)
        for name in ("tool.py", "plain", "say"):
            assert (directory / "bin" / name).stat().st_mode & 0o777 == 0o755
        assert "print('a tool')" in (directory / "bin/tool.py").read_text()
        assert "python" not in (directory / "bin/tool.py").read_text().splitlines()[0].split("/")[0]


@pytest.mark.slow
async def test_packages_of_a_source_build_are_not_shared(index: Index, tmp_path: Path) -> None:
    async with world(tmp_path, index, allow_source_builds=True) as found:
        mine, others = await found.install("two"), await found.install("one", "two")
        assert mine.installed == others.installed
        assert mine.environment != others.environment
    for number, each in enumerate((mine, others)):
        async with world(tmp_path / f"{number}", index, allow_source_builds=True) as elsewhere:
            await elsewhere.packages.ensure("sess_1", each, TEMPLATE)
            assert each.environment is not None
            assert await elsewhere.driver.packages.use(each.environment)


async def test_names_of_environments_depend_on_the_database(index: Index, tmp_path: Path) -> None:
    async with world(tmp_path, index) as found:
        mine = (await found.install("one")).environment
        found.packages._secret = b"another"
        assert (await found.install("one")).environment != mine


async def test_conflicts_are_reported_by_package(index: Index, tmp_path: Path) -> None:
    async with world(tmp_path, index) as found:
        has = (await found.driver.packages.interpreter(TEMPLATE)).packages["pip"]
        with pytest.raises(Conflict) as raised:
            await found.install("pip <1")
        assert raised.value.code == "version_conflict"
        expected = [{"name": "pip", "requested": "<1", "template_has": has}]
        assert raised.value.details["conflicts"] == expected


@pytest.mark.slow
async def test_packages_of_the_system_python_do_not_conflict(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(TEMPLATE, id=DEFAULT_TEMPLATE)
    newer = Install((Dependency("one", ">=1"),), 60)
    async with world(tmp_path, index) as found:
        environments = found.driver.packages
        asked = environments.interpreter

        async def with_another(template: Template) -> Interpreter:
            known = await asked(template)
            return replace(known, packages={**known.packages, "one": "0.5"})

        monkeypatch.setattr(environments, "interpreter", with_another)
        with pytest.raises(Conflict):
            await found.packages.begin(newer, TEMPLATE)

        begun = await found.packages.begin(newer, machine)
        done = await found.packages.install("sess_1", begun, machine)
        assert done.installed == ("one==1.0",)
        # What a Python comes with is the template's still.
        with pytest.raises(Conflict):
            await found.packages.begin(Install((Dependency("pip", "<1"),), 60), machine)


@pytest.mark.slow
async def test_a_very_long_log_keeps_its_beginning_and_its_end(
    index: Index, tmp_path: Path
) -> None:
    code = "for i in range(60000): print('line', i)\nraise SystemExit(1)"
    index.add_source("talks", code=code)
    async with world(tmp_path, index, allow_source_builds=True) as found:
        assert (await found.install("talks")).status is InstallStatus.FAILED
        log = await found.packages.log("sess_1")
        assert log.startswith(b"Looking for talks")
        assert b"line 59999" in log
        assert len(log) < 300 * 1024


# Removal of unused sets


@pytest.mark.slow
async def test_the_least_recently_used_sets_are_removed_first_and_used_ones_never(
    index: Index, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        index.add(name, "1.0", files={f"{name}.txt": name * MiB})
    async with world(tmp_path, index) as found:
        made = {name: await found.install(f"{name} ==1.0") for name in ("a", "b", "c")}
        names = {name: install.environment for name, install in made.items()}
        settings = Settings(data_dir=tmp_path)
        url = f"sqlite:///{tmp_path / 'atoll.db'}"
        store = SqlStore([url], sqlite=settings.sqlite, database=settings.database)
        await store.open()
        session = make_session(
            status=SessionStatus.RUNNING, runtime_node="local", install=made["a"]
        )
        await store.sessions.add(session)
        small = settings.packages.model_copy(update={"cache_size": 2 * MiB + MiB // 2})
        sweep = PackageSweep(
            replica_on(store, found.packages._leases, found.clock, "local"),
            found.driver.packages,
            small,
        )

        async def remaining() -> set[str | None]:
            await sweep.once()
            return {info.name for info in await found.driver.packages.listed()}

        assert len(await remaining()) == 3  # All were used a moment ago.
        found.clock.ahead = ORPHAN_AGE + timedelta(seconds=5)
        assert await remaining() == {names["a"], names["c"]}
        assert await found.install("b ==1.0") == made["b"]  # Installed again.
        ended = replace(session, status=SessionStatus.TERMINATED, ended_at=found.clock.now())
        await store.sessions.save(ended)
        found.clock.ahead *= 2
        assert await remaining() == {names["c"], names["b"]}
        await store.close()
