"""Starts of instances as forks of a warm interpreter, and what happens when one cannot be had."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.spawner import MAX_FORK_SERVERS
from atoll.drivers.shared.processes import namespace_pid
from atoll.errors import InstanceNotStarted
from atoll.settings import LocalSettings
from tests.contract.drivers.conftest import LINK, opened, printed, spec, started, template
from tests.contract.drivers.test_driver_contract import until
from tests.host_processes import below, living, of_instances, processes
from tests.standstill import stand_still

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.local.spawner_client import SpawnRequest
    from atoll.model.instance import Handle

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.quick,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's instances are forks"),
]


@pytest.fixture
async def driver(bubblewrap: str, tmp_path: Path) -> AsyncIterator[LocalDriver]:
    async with opened(LocalDriver(tmp_path / "data", LocalSettings(), LINK)) as made:
        yield made


def is_fork(handle: Handle) -> bool:
    """Bubblewrap is a process of its own, and the parent of PID 1."""
    return handle.data["pid"] == handle.data["child"]


def spawner(driver: LocalDriver) -> int:
    assert driver._spawner._process is not None
    return driver._spawner._process.pid


def fork_server(driver: LocalDriver) -> int:
    of_spawner = {pid for pid, (parent, _, _) in processes().items() if parent == spawner(driver)}
    (found,) = of_spawner - of_instances(of_spawner)
    return found


def mounted(directory: Path) -> bool:
    loops = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return any(str(directory) in text for text in (Path("/proc/mounts").read_text(), *loops))


async def reaped(pid: int) -> None:
    async def is_reaped() -> bool:
        return pid not in processes()

    await until(is_reaped, f"the end of {pid}")


def change_requests(driver: LocalDriver, patch: pytest.MonkeyPatch, **changes: Any) -> None:
    spawn = driver._spawner.spawn

    def changed(request: SpawnRequest) -> Any:
        return spawn(replace(request, **changes))

    patch.setattr(driver._spawner, "spawn", changed)


async def assert_nothing_is_left(driver: LocalDriver, directory: Path) -> None:
    server = fork_server(driver)

    async def alone() -> bool:
        return below(spawner(driver)) == {server}

    await until(alone, f"the end of all but {server} below {spawner(driver)}")
    assert await driver.handles() == []
    assert driver._groups.names() == []
    assert not mounted(directory)


async def assert_starts_forks(driver: LocalDriver) -> None:
    handle, link = await started(driver, spec())
    assert is_fork(handle)
    assert await printed(driver, link, "print(1)") == "1"
    link.close()
    await driver.destroy(handle)


# The fork server


async def test_a_killed_fork_server_is_replaced_a_few_times(driver: LocalDriver) -> None:
    _, link = await started(driver, spec())
    for _ in range(MAX_FORK_SERVERS):
        await assert_starts_forks(driver)
        server = fork_server(driver)
        os.kill(server, signal.SIGKILL)
        await reaped(server)
    with capture_logs() as logs:
        handle, other = await started(driver, spec())
    assert not is_fork(handle)
    assert await printed(driver, other, "print(2)") == "2"
    other.close()
    (entry,) = (entry for entry in logs if entry["event"] == "instances.not_forked")
    assert f"{MAX_FORK_SERVERS} times" in entry["reason"]
    # Its forks do not depend on it.
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


async def test_starts_under_way_succeed_without_the_fork_server(driver: LocalDriver) -> None:
    await assert_starts_forks(driver)
    server = fork_server(driver)
    stand_still(server)
    starting = [asyncio.create_task(driver.ensure(spec())) for _ in range(6)]

    async def all_wait() -> bool:
        return len(below(spawner(driver))) >= 1 + len(starting)

    await until(all_wait, "processes that wait for the fork server")
    os.kill(server, signal.SIGKILL)
    for handle in await asyncio.gather(*starting):
        link = await driver.connect(handle)
        assert await printed(driver, link, "print(1)") == "1"
        link.close()
    await assert_starts_forks(driver)
    assert fork_server(driver) != server


async def test_a_replaced_interpreter_gets_a_fork_server_of_its_own(
    driver: LocalDriver, tmp_path: Path
) -> None:
    known = driver._requests.fork_server
    assert known is not None
    python = tmp_path / "python"

    def install() -> None:
        new = tmp_path / "new"
        new.write_text(f'#!/bin/sh\nexec {known.argv[0]} "$@"\n')
        new.chmod(0o755)
        new.replace(python)

    install()
    server = replace(
        known,
        argv=[str(python), *known.argv[1:]],
        # A directory: the file is replaced in it.
        files=[*known.files, "--ro-bind", str(tmp_path), str(tmp_path)],
    )
    driver._requests = replace(driver._requests, fork_server=server)
    old, link = await started(driver, spec())
    before = fork_server(driver)
    await assert_starts_forks(driver)
    assert fork_server(driver) == before

    install()
    await assert_starts_forks(driver)
    await reaped(before)
    assert is_fork(old)
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


# A start


@pytest.mark.parametrize("victim", ["first process", "starter"])
async def test_a_start_fails_when_its_process_is_killed(
    driver: LocalDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """While it waits to enter a control group, with the sandbox made or in the making."""
    gate = tmp_path / "group" / "cgroup.procs"
    gate.parent.mkdir()
    os.mkfifo(gate)
    await assert_starts_forks(driver)
    server, found = fork_server(driver), dict[str, int]()
    wanted = spec()
    groups = [*driver._groups.join_files(wanted.instance_id), str(gate)]

    async def begun() -> bool:
        for pid, (parent, _, _) in processes().items():
            if parent == spawner(driver) and pid != server:
                found["first process" if namespace_pid(pid) == 1 else "starter"] = pid
        return len(found) == 2

    with monkeypatch.context() as patch:
        change_requests(driver, patch, groups=groups)
        starting = asyncio.create_task(driver.ensure(wanted))
        await until(begun, "the start's processes")
        os.kill(found[victim], signal.SIGKILL)
        reader = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(InstanceNotStarted):
            await starting
        os.close(reader)
    await assert_nothing_is_left(driver, tmp_path)
    await assert_starts_forks(driver)
    assert fork_server(driver) == server


async def test_a_start_succeeds_or_fails_whichever_process_is_killed(
    driver: LocalDriver, tmp_path: Path
) -> None:
    """At any moment: forks, the processes that make a sandbox, PID 1 and what it starts."""
    await assert_starts_forks(driver)
    server, chance = fork_server(driver), random.Random(17)
    failures = 0
    for _ in range(30):
        seen, spared = {server}, chance.randrange(4)
        starting = asyncio.create_task(driver.ensure(spec()))
        while not starting.done():
            for pid in below(spawner(driver)) - seen:
                if len(seen) > spared:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                seen.add(pid)
            await asyncio.sleep(0)
        try:
            await driver.destroy(await starting)
        except InstanceNotStarted:
            failures += 1
    assert failures
    await assert_nothing_is_left(driver, tmp_path)
    await assert_starts_forks(driver)
    assert fork_server(driver) == server


async def test_an_ephemeral_fork_ends_with_its_spawner(driver: LocalDriver) -> None:
    handle, link = await started(driver, spec(ephemeral=True))
    assert is_fork(handle)
    inside = below(int(handle.data["child"])) | {int(handle.data["child"])}
    server = fork_server(driver)
    os.kill(spawner(driver), signal.SIGKILL)

    async def has_ended() -> bool:
        return not (inside | {server}) & living()

    await until(has_ended, "its end")
    link.close()


# Confinement without a filter

NESTED = """
import ctypes, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
NEW_USERS, NEW_MOUNTS, REMOUNT, BIND, DETACH = 0x10000000, 0x20000, 32, 4096, 2
done = []
def attempt(what, call):
    try:
        if call() in (None, 0):
            done.append(what)
    except (OSError, ValueError):
        pass
uid = os.getuid()
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(status["NoNewPrivs"].strip(), status["Seccomp"].strip(), {
    value.strip("0\\n") for name, value in status.items() if name.startswith("Cap")})
if libc.unshare(NEW_USERS | NEW_MOUNTS) == 0:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
        open(f"/proc/self/{name}", "w").write(text)
    print("nested as", os.getuid())
attempt("host name", lambda: libc.sethostname(b"evil", 4))
for place in (b"/", b"/etc", b"/usr", b"/run/atoll/executor.pyz"):
    attempt(("remount", place), lambda: libc.mount(b"none", place, None, REMOUNT | BIND, None))
for place in (b"/proc/keys", b"/proc/sys", b"/proc/acpi", b"/etc", b"/"):
    attempt(("unmount", place), lambda: libc.umount2(place, DETACH))
for kind in (b"proc", b"sysfs", b"cgroup2", b"ext4"):
    attempt(("mount", kind), lambda: libc.mount(kind, b"/workspace", kind, 0, None))
for kind in ("mnt", "user", "pid", "net"):
    attempt(("setns", kind), lambda: libc.setns(os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), 0))
attempt("memory of PID 1", lambda: os.close(os.open("/proc/1/mem", os.O_RDWR)))
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
attempt("device", lambda: os.mknod("/workspace/disk", 0o060666, os.makedev(7, 0)))
attempt("reboot", lambda: libc.reboot(0x1234567))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("limit", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)))
attempt("clock", lambda: libc.settimeofday(bytes(16), None))
attempt("owner", lambda: os.chown("/workspace/file", 0, 12345))
attempt("setuid", lambda: os.setuid(12345))
print(done)
"""


async def test_a_fork_has_no_privileges_even_without_a_filter(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a user namespace that it makes give it any over the sandbox."""
    with monkeypatch.context() as patch:
        change_requests(driver, patch, seccomp=None)
        handle, link = await started(driver, spec())
    assert is_fork(handle)
    lines = (await printed(driver, link, NESTED)).splitlines()
    assert lines[0] == "1 0 {''}"
    assert lines[-1] == "[]"
    link.close()


# Bubblewrap

PYTHON = os.path.realpath(sys.executable)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"fork_server": False}, {}),
        ({"python": Path(PYTHON)}, {}),
        ({}, {"python": PYTHON}),
    ],
    ids=["switched off", "an interpreter of the node", "an interpreter of the template"],
)
async def test_other_instances_are_started_by_bubblewrap(
    bubblewrap: str, tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with opened(LocalDriver(tmp_path / "data", LocalSettings(**settings), LINK)) as driver:
        handle, link = await started(driver, spec(template=template(**fields)))
        assert not is_fork(handle)
        assert await printed(driver, link, "print(1)") == "1"
        link.close()
