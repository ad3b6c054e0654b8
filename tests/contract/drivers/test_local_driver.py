"""What the local driver does when its machine does not do its part."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from atoll.drivers.local import sandbox_host
from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.spawner_client import SpawnRequest
from atoll.drivers.shared import disk_images
from atoll.errors import TemporaryError
from atoll.link.errors import LinkLost
from atoll.model.instance import State
from atoll.settings import LinkSettings, LocalSettings
from tests.contract.drivers.conftest import opened, printed, spec, started, template
from tests.contract.drivers.parts import pausing_of
from tests.e2e.api import eventually
from tests.host_processes import below, living, of_instances
from tests.standstill import go_on, stand_still

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.shared.workspace_files import Workspace
    from atoll.model.instance import InstanceSpec

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

LINK = LinkSettings(connect_timeout=timedelta(seconds=0.3), start_timeout=timedelta(seconds=20))


@pytest.fixture
async def driver(bubblewrap: str, tmp_path: Path) -> AsyncIterator[LocalDriver]:
    async with opened(LocalDriver(tmp_path / "data", LocalSettings(), LINK)) as made:
        yield made


def running(driver: LocalDriver) -> set[int]:
    """Processes of instances, on a machine without control groups."""
    process = driver._spawner._process
    return of_instances(below(process.pid)) if process else set()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "node_full"),
        (errno.EDQUOT, "node_full"),
        (errno.EIO, "instance_not_started"),
    ],
)
async def test_a_failed_start_leaves_no_process(
    bubblewrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    # Without control groups, processes are found by their pids alone.
    settings = LocalSettings(cgroup_root=tmp_path)
    async with opened(LocalDriver(tmp_path / "data", settings, LINK)) as driver:
        seen: set[int] = set()

        def fail(*_: Any) -> None:
            seen.update(running(driver))
            raise OSError(number, os.strerror(number))

        wanted = spec()
        with monkeypatch.context() as patch:
            patch.setattr(driver._handles, "write", fail)
            with pytest.raises(TemporaryError) as caught:
                await driver.ensure(wanted)
        assert caught.value.code == code
        assert seen
        # What has started the instance may be about to exit.
        await asyncio.to_thread(eventually, lambda: not seen & living())
        assert await driver.handles() == []
        assert (await driver.status()).problem == caught.value.message

        _, link = await started(driver, wanted)
        assert await printed(driver, link, "print(1)") == "1"
        assert (await driver.status()).problem is None
        link.close()


async def test_a_start_cancelled_during_preparation_starts_no_process(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled, prepare = asyncio.Event(), threading.Event(), driver._prepare
    loop, spawned = asyncio.get_running_loop(), []

    def slow(wanted: InstanceSpec) -> Workspace:
        prepared = prepare(wanted)
        loop.call_soon_threadsafe(begun.set)
        assert cancelled.wait(60)
        return prepared

    async def spawn(request: SpawnRequest) -> tuple[int, int]:
        spawned.append(request)
        raise TemporaryError("It was to start nothing.")

    monkeypatch.setattr(driver, "_prepare", slow)
    monkeypatch.setattr(driver._spawner, "spawn", spawn)
    making = asyncio.create_task(driver.ensure(spec()))
    await begun.wait()
    making.cancel()
    loop.call_soon(cancelled.set)
    with pytest.raises(asyncio.CancelledError):
        await making
    assert spawned == []
    assert await driver.handles() == []
    assert await driver.workspaces.names() == []
    assert driver._groups.names() == []


async def test_a_failure_to_create_a_file_system_leaves_nothing(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "disk_quota" not in driver.capabilities.provides:
        pytest.skip("workspaces are directories here")
    broken = tmp_path / "mkfs"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(disk_images, "MKFS", str(broken))
    with pytest.raises(TemporaryError, match="no such luck") as caught:
        await driver.ensure(spec())
    assert caught.value.code == "instance_not_started"
    assert await driver.handles() == []
    assert await driver.workspaces.names() == []
    assert list((tmp_path / "data/node/blank").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe",
        b'{"instance_id": "i", "driver": "local", "version": 1, "data": {}}',
        b'{"instance_id": "i", "driver": "local", "version": 1, "data": null}',
    ],
)  # fmt: skip
async def test_a_damaged_handle_counts_as_missing(
    driver: LocalDriver, tmp_path: Path, text: bytes
) -> None:
    wanted = spec()
    first = await driver.ensure(wanted)
    (tmp_path / "data/node/instances" / wanted.instance_id / "handle.json").write_bytes(text)
    with capture_logs() as logs:
        (found,) = await driver.handles()
    assert found.instance_id == wanted.instance_id
    assert (await driver.observe(found)).state is State.GONE
    assert [entry["event"] for entry in logs] == ["instance.handle_damaged"]
    if not driver._groups.provides:
        os.kill(int(first.data["child"]), signal.SIGKILL)

    # What ran under it is not left beside the next.
    _, link = await started(driver, wanted)
    assert (await driver.observe(first)).state is not State.RUNNING
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


async def test_the_long_start_timeout_does_not_apply_to_an_instance_that_was_ready(
    driver: LocalDriver,
) -> None:
    handle, link = await started(driver, spec())
    link.close()
    stand_still(int(handle.data["child"]))
    begun = time.monotonic()
    with pytest.raises(LinkLost):
        await driver.connect(handle)
    assert time.monotonic() - begun < 10


async def test_a_new_instance_has_a_longer_timeout(driver: LocalDriver) -> None:
    handle = await driver.ensure(spec())
    stand_still(int(handle.data["child"]))
    connecting = asyncio.create_task(driver.connect(handle))
    done, _ = await asyncio.wait([connecting], timeout=1)
    assert not done
    go_on(int(handle.data["child"]))
    (await connecting).close()


async def test_an_unusable_instance_can_be_stopped(driver: LocalDriver) -> None:
    handle = await driver.ensure(spec(template=template(preload=("no_such_module",))))
    await driver.stop(handle, grace=timedelta(seconds=5))
    assert (await driver.observe(handle)).state is not State.RUNNING


async def test_a_driver_reports_why_it_cannot_create_instances(
    bubblewrap: str, tmp_path: Path
) -> None:
    own = tmp_path / "bwrap"
    own.symlink_to(bubblewrap)
    driver = LocalDriver(tmp_path / "data", LocalSettings(bubblewrap=str(own)), LINK)
    await driver.open()
    assert (await driver.status()).problem is None
    own.unlink()
    assert str(own) in ((await driver.status()).problem or "")
    own.symlink_to(bubblewrap)
    node = tmp_path / "data/node"
    node.rename(tmp_path / "elsewhere")
    assert str(node) in ((await driver.status()).problem or "")
    assert (await driver.status()).load.disk_free == 0
    (tmp_path / "elsewhere").rename(node)
    assert (await driver.status()).problem is None
    await driver.close()


def test_a_mount_does_not_follow_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path.resolve() / "first", tmp_path.resolve() / "second"
    (first / "image").mkdir(parents=True)
    second.mkdir()
    (tmp_path / "link").symlink_to(first)
    monkeypatch.setattr(sandbox_host, "STAGES", (str(first), str(second)))
    assert sandbox_host.free_stage([str(tmp_path / "link/image"), "/nowhere"]) == str(second)


async def test_groups_without_an_instance_are_removed_with_their_processes(
    driver: LocalDriver, tmp_path: Path
) -> None:
    if not driver._groups.provides:
        pytest.skip("there are no control groups here")
    kept, link = await started(driver, spec())
    lost, second = await started(driver, spec())
    second.close()
    if driver._groups.freezes:
        await pausing_of(driver).pause(lost)
    driver._groups.make("install-one", spec().resources)
    shutil.rmtree(tmp_path / "data/node/instances" / lost.instance_id)
    inside = below(int(lost.data["child"])) | {int(lost.data["child"])}
    assert await driver.handles() == [kept]
    assert lost.instance_id not in driver._groups.names()
    await asyncio.to_thread(eventually, lambda: not inside & living())
    assert not (tmp_path / "data/node/instances" / lost.instance_id).exists()
    assert await printed(driver, link, "print(1)") == "1"
    assert "install-one" in driver._groups.names()
    driver._groups.remove("install-one")
    link.close()


async def test_instances_being_created_are_not_treated_as_leftovers(driver: LocalDriver) -> None:
    making = [asyncio.create_task(driver.ensure(spec())) for _ in range(4)]
    while not all(task.done() for task in making):
        await driver.handles()
    for task in making:
        assert (await driver.observe(task.result())).state is State.RUNNING
