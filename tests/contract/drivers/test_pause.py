"""Instances that are paused and resumed with their memory, on a real node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.pausing import LocalPausing
from atoll.drivers.shared import cgroups
from atoll.errors import TemporaryError
from atoll.link.errors import LinkLost
from atoll.model.instance import Handle, State
from tests.contract.drivers.conftest import (
    Node,
    RunOutput,
    everywhere,
    job,
    on,
    printed,
    spec,
    started,
)
from tests.contract.drivers.parts import pausing_of
from tests.contract.drivers.test_driver_contract import until
from tests.host_processes import living
from tests.runs import run_over

if TYPE_CHECKING:
    from atoll.link.client import Link

pytestmark = pytest.mark.anyio

BUSY = "print('on', flush=True)\nn = 0\nwhile True: n += 1"
FORKS = """
import os, signal, threading
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
for _ in range(4):
    threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()
print('on', flush=True)
while True:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
"""


@pytest.fixture
def pausing(node: Node) -> Node:
    if node.driver.pausing is None:
        pytest.skip("instances of this node cannot be paused")
    return node


def ticks(node: Node, handle: Handle) -> int:
    """CPU time that its processes have used, in clock ticks."""
    total = 0
    for pid in node.inside(handle):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


async def running(node: Node, link: Link, code: str) -> tuple[asyncio.Task[object], RunOutput]:
    output = RunOutput()
    request = job(node.driver, code, timeout=120.0)
    task: asyncio.Task[object] = asyncio.create_task(run_over(link, request, output))

    async def begun() -> bool:
        return b"on" in output.stdout

    await until(begun, "the run's first word")
    return task, output


async def ended(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def state(node: Node, handle: Handle) -> State:
    return (await node.driver.observe(handle)).state


async def test_a_paused_instance_uses_no_cpu_and_continues_after_a_resume(pausing: Node) -> None:
    handle, link = await started(pausing.driver, spec())
    task, output = await running(
        pausing,
        link,
        "print('on', flush=True)\nn = 0\nwhile True:\n"
        "    n += 1\n    if not n % 1_000_000: print(n, flush=True)",
    )
    for _ in range(2):
        await pausing_of(pausing.driver).pause(handle)
        assert await state(pausing, handle) is State.PAUSED
    before = ticks(pausing, handle)
    spent = len(output.pieces)
    # The time that a machine of one processor would have given it, were it running.
    begun = time.process_time()
    while time.process_time() - begun < 0.3:
        pass
    assert ticks(pausing, handle) == before
    await asyncio.sleep(0)
    assert len(output.pieces) <= spent + 1  # What was on its way already.
    for _ in range(2):
        await pausing_of(pausing.driver).resume(handle)
        assert await state(pausing, handle) is State.RUNNING

    async def further() -> bool:
        return ticks(pausing, handle) > before and len(output.pieces) > spent + 1

    await until(further, "more of the loop")
    assert not task.done()
    await ended(task)
    link.close()


@everywhere
async def test_memory_and_processes_survive_a_pause(pausing: Node) -> None:
    handle, link = await started(pausing.driver, spec())
    request = job(
        pausing.driver,
        "import subprocess, sys\nmemory = bytes(range(256)) * 4096\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print('on', flush=True)\nsys.stdin.readline()\n"
        "said, _ = child.communicate(b'cat is here')\n"
        "print(said.decode(), memory == bytes(range(256)) * 4096)",
        stdin_open=True,
    )
    output = RunOutput()
    task = asyncio.create_task(run_over(link, request, output))

    async def begun() -> bool:
        return b"on" in output.stdout

    await until(begun, "its first word")
    await pausing_of(pausing.driver).pause(handle)
    inside = pausing.inside(handle)
    # A request to a paused instance arrives after the resume, on the same connection.
    sending = asyncio.create_task(link.call("stdin", id=request["id"], data="Cg==", end=False))
    done, _ = await asyncio.wait([sending, task], timeout=0.2)
    assert not done
    assert pausing.inside(handle) == inside
    await pausing_of(pausing.driver).resume(handle)
    await sending
    result = await task
    assert result["exit_code"] == 0
    assert output.stdout.endswith(b"cat is here True\n")
    link.close()


@everywhere
async def test_a_paused_instance_outlives_its_driver_and_its_links(pausing: Node) -> None:
    handle, link = await started(pausing.driver, spec())
    request = job(pausing.driver, "import time; print('on', flush=True); time.sleep(0.5); print(7)")
    output = RunOutput()
    task = asyncio.create_task(run_over(link, request, output))

    async def begun() -> bool:
        return b"on" in output.stdout

    await until(begun, "its first word")
    await pausing_of(pausing.driver).pause(handle)
    with pytest.raises(LinkLost):
        await pausing.driver.connect(handle)
    link.close()
    await asyncio.gather(task, return_exceptions=True)
    driver = await pausing.take_over()
    assert await driver.handles() == [handle]
    assert await state(pausing, handle) is State.PAUSED
    await pausing_of(driver).resume(handle)
    second = await driver.connect(handle)
    again = RunOutput()
    assert (await second.attach(request["id"], 0, again))["exit_code"] == 0
    assert again.stdout == b"on\n7\n"
    second.close()


async def test_ensure_returns_a_paused_instance_unchanged(pausing: Node) -> None:
    wanted = spec()
    handle = await pausing.driver.ensure(wanted)
    await pausing_of(pausing.driver).pause(handle)
    assert await pausing.driver.ensure(wanted) == handle
    assert await state(pausing, handle) is State.PAUSED


@pytest.mark.parametrize("grace", [0.0, 5.0])
@pytest.mark.parametrize("code", [BUSY, FORKS], ids=["busy", "forks"])
async def test_a_paused_instance_can_be_stopped_and_its_code_does_not_continue(
    pausing: Node, grace: float, code: str
) -> None:
    handle, link = await started(pausing.driver, spec())
    task, _ = await running(pausing, link, code)
    await pausing_of(pausing.driver).pause(handle)
    inside = pausing.inside(handle)
    for _ in range(2):
        await pausing.driver.stop(handle, grace=timedelta(seconds=grace))
        assert await state(pausing, handle) not in (State.RUNNING, State.PAUSED)
    assert not inside & living()
    await asyncio.gather(task, return_exceptions=True)
    await pausing.driver.destroy(handle)
    assert await pausing.driver.handles() == []


@everywhere
async def test_destroying_a_paused_instance_leaves_nothing(pausing: Node) -> None:
    handle, link = await started(pausing.driver, spec())
    await pausing_of(pausing.driver).pause(handle)
    inside = pausing.inside(handle)
    await pausing.driver.destroy(handle)
    assert not inside & living()
    assert await pausing.driver.handles() == []
    link.close()


async def test_code_that_forks_and_ignores_signals_is_paused(
    pausing: Node,
) -> None:
    handle, link = await started(pausing.driver, spec())
    task, _ = await running(pausing, link, FORKS)
    for _ in range(5):
        await pausing_of(pausing.driver).pause(handle)
        inside, before = pausing.inside(handle), ticks(pausing, handle)
        begun = time.process_time()
        while time.process_time() - begun < 0.05:
            pass
        assert (pausing.inside(handle), ticks(pausing, handle)) == (inside, before)
        await pausing_of(pausing.driver).resume(handle)
    await ended(task)
    assert await printed(pausing.driver, link, "print(1)") == "1"
    link.close()


async def test_pausing_and_resuming_a_destroyed_instance_does_nothing(pausing: Node) -> None:
    handle = await pausing.driver.ensure(spec())
    await pausing.driver.destroy(handle)
    await pausing_of(pausing.driver).pause(handle)
    await pausing_of(pausing.driver).resume(handle)
    other = replace(handle, data=handle.data | {"child": os.getpid(), "pid": os.getpid()})
    await pausing_of(pausing.driver).pause(other)
    assert await state(pausing, handle) is State.GONE
    assert await pausing.driver.handles() == []


async def test_concurrent_pauses_and_resumes_end_in_one_of_both_states(pausing: Node) -> None:
    handle, link = await started(pausing.driver, spec())
    for _ in range(5):
        calls = [
            pausing_of(pausing.driver).pause(handle),
            pausing_of(pausing.driver).resume(handle),
        ] * 4
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert outcome is None or isinstance(outcome, TemporaryError)
    await pausing_of(pausing.driver).resume(handle)
    assert await state(pausing, handle) is State.RUNNING
    assert await printed(pausing.driver, link, "print(1)") == "1"
    link.close()


@on("local")
async def test_an_instance_that_cannot_be_frozen_keeps_running(node: Node) -> None:
    driver = node.driver
    assert isinstance(driver, LocalDriver)
    handle, link = await started(driver, spec())
    # Its groups never report that all processes are frozen.
    pausing = LocalPausing(cgroups.ControlGroups(), driver._states)
    with pytest.raises(TemporaryError) as caught:
        await pausing.pause(handle)
    assert caught.value.code == "pause_timeout"
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


@on("local")
async def test_an_instance_started_outside_the_freezer_is_paused_too(pausing: Node) -> None:
    driver = pausing.driver
    assert isinstance(driver, LocalDriver)
    groups = driver._groups
    if not isinstance(groups, cgroups.CgroupV1):
        pytest.skip("version 2 has its freezer in every group")
    handle, link = await started(driver, spec())
    assert groups._freezer is not None
    group = groups._freezer / handle.instance_id
    outside = groups._freezer.parent / "cgroup.procs"

    async def alone() -> bool:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                outside.write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    await until(alone, "an empty group")
    assert await state(pausing, handle) is State.RUNNING
    task, _ = await running(pausing, link, BUSY)
    await pausing_of(driver).pause(handle)
    before = ticks(pausing, handle)
    begun = time.process_time()
    while time.process_time() - begun < 0.05:
        pass
    assert ticks(pausing, handle) == before
    await pausing_of(driver).resume(handle)
    await ended(task)
    link.close()


async def test_a_node_that_cannot_pause_reports_the_reason(node: Node) -> None:
    if node.driver.pausing is not None:
        pytest.skip("instances of this node can be paused")
    assert node.driver.capabilities.unavailable["pausing"]
