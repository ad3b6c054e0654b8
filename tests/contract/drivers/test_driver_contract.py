"""What every driver promises (`drivers/base.py`), on a real node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import InvalidRequest, NotFound, PermanentError
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.instance import Handle, Observation, State
from atoll.model.session import Cause
from atoll.model.template import REQUIREMENTS
from tests import unprivileged
from tests.contract.drivers.conftest import (
    LIMITS,
    ON_CLUSTER,
    MiB,
    RunOutput,
    durable,
    everywhere,
    everywhere_durable,
    job,
    on,
    over_every_link,
    printed,
    spec,
    started,
    template,
)
from tests.contract.drivers.parts import resizing_of
from tests.host_processes import living
from tests.rootfs import build_rootfs
from tests.runs import run_over
from tests.standstill import stand_still

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.contract.drivers.conftest import Node

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)


# Instances


@over_every_link
async def test_ensuring_twice_gives_the_same_instance(node: Node) -> None:
    wanted = spec()
    first = await node.driver.ensure(wanted)
    assert await node.driver.ensure(wanted) == first
    assert await node.driver.handles() == [first]
    assert (await node.driver.observe(first)).state is State.RUNNING


async def test_an_idle_instance_uses_far_less_than_its_limit(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    (await node.driver.connect(handle)).close()
    used = await node.driver.limits.memory_used(handle)

    if node.counts_memory:
        assert used is not None
        assert 1 * MiB < used < LIMITS.memory
    else:
        assert used is None
    await node.driver.destroy(handle)
    assert await node.driver.limits.memory_used(handle) is None


async def test_concurrent_calls_create_distinct_instances(node: Node) -> None:
    handles = await asyncio.gather(*(node.driver.ensure(spec()) for _ in range(4)))
    assert len({node.pid_1(handle) for handle in handles}) == 4
    assert sorted(await node.driver.handles(), key=str) == sorted(handles, key=str)


@everywhere
async def test_ensure_replaces_a_dead_instance(node: Node) -> None:
    wanted = spec()
    first = await node.driver.ensure(wanted)
    ended = node.pid_1(first)
    os.kill(ended, signal.SIGKILL)
    await until(lambda: gone(node, first), "its end")
    second = await node.driver.ensure(replace(wanted, workspace=node.driver.workspaces.of(first)))
    assert node.pid_1(second) != ended
    assert (await node.driver.observe(second)).state is State.RUNNING


async def gone(node: Node, handle: Handle) -> bool:
    return (await node.driver.observe(handle)).state is not State.RUNNING


def cancelled(**kinds: list[int]) -> pytest.MarkDecorator:
    """After how many turns of the loop: what a driver awaits there differs from kind to kind."""
    cases = [(kind, turns) for kind, cases in kinds.items() for turns in cases]
    return pytest.mark.parametrize(("node", "turns"), cases, indirect=["node"])


@cancelled(
    local=[0, 1, 2, 3, 5, 8, 13, 30, 60],
    docker=[0, 3, 30, 200],
    kubernetes=[0, 20, 100, 500, 1000],
)
async def test_a_repeated_call_cleans_up_after_a_cancelled_ensure(node: Node, turns: int) -> None:
    wanted = spec()
    making = asyncio.create_task(node.driver.ensure(wanted))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    handle, link = await started(node.driver, wanted)
    assert await printed(node.driver, link, "print(1)") == "1"
    link.close()
    assert [found.instance_id for found in await node.driver.handles()] == [wanted.instance_id]
    await node.driver.destroy(handle)
    await node.driver.workspaces.discard(node.driver.workspaces.of(handle))
    assert await node.driver.handles() == []
    assert await node.driver.workspaces.names() == []

    await until(node.alone, "the end of what was cancelled")


@cancelled(local=[0, 2, 5, 13, 40], docker=[1, 13, 100], kubernetes=[30, 700])
async def test_destroying_the_handle_cleans_up_after_a_cancelled_ensure(
    node: Node, turns: int
) -> None:
    making = asyncio.create_task(node.driver.ensure(spec()))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    for handle in await node.driver.handles():
        await node.driver.destroy(handle)
    assert await node.driver.handles() == []

    await until(node.alone, "the end of what was cancelled")


@over_every_link
async def test_a_killed_instance_is_observed_with_its_cause(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    os.kill(node.pid_1(handle), signal.SIGKILL)
    await until(lambda: gone(node, handle), "its end")

    async def told() -> bool:
        return (await node.driver.observe(handle)).state is State.EXITED

    await until(told, "how it ended")
    assert (await node.driver.observe(handle)).cause is Cause.SIGNAL
    with pytest.raises((LinkLost, PermanentError)):
        await node.driver.connect(handle)


@over_every_link
async def test_an_instance_that_shuts_down_is_observed_as_exited(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    with suppress(LinkLost):  # A relay may end before it has passed on the answer.
        await link.call("shutdown")
    await link.closed

    async def told() -> bool:
        return (await node.driver.observe(handle)).state is State.EXITED

    await until(told, "how it ended")
    exited = Observation(State.EXITED, Cause.EXIT)
    assert await node.driver.observe(handle) == exited
    driver = await node.take_over()
    # If only the process of the driver was notified, the cause is lost with it.
    assert await driver.observe(handle) == (
        Observation(State.GONE) if node.kind == "local" else exited
    )


async def test_the_cause_is_oom_if_the_supervisor_ran_out_of_memory(node: Node) -> None:
    if "cgroup_memory" not in node.driver.capabilities.provides:
        pytest.skip("the kernel does not count memory here")
    handle, link = await started(node.driver, spec())
    # The least that a Docker engine takes is 6 MiB, and its containers have ours in it too; relays
    # as well, where those are.
    least = {"local": MiB, "docker": 24 * MiB}.get(node.kind, 64 * MiB)
    assert await resizing_of(node.driver).resize(handle, replace(LIMITS, memory=least))
    # More than there is for the supervisor, which holds a request until it has all of it.
    others = [await node.driver.connect(handle) for _ in range(4)]
    calls = [other.call("stat", path="x" * 30 * MiB) for other in others]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(outcome, LinkLost) for outcome in outcomes)
    link.close()
    await until(lambda: gone(node, handle), "its end")
    first = await node.driver.observe(handle)
    assert (first.state, first.cause) == (State.EXITED, Cause.OOM)
    driver = await node.take_over()
    assert await driver.observe(handle) == first
    await driver.destroy(handle)
    assert (await driver.observe(handle)).state is State.GONE


async def test_an_unknown_handle_is_observed_as_gone_without_an_error(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    await node.driver.destroy(handle)
    assert (await node.driver.observe(handle)).state is State.GONE
    with pytest.raises(LinkLost):
        await node.driver.connect(handle)


@on("local")
async def test_a_reused_pid_is_not_mistaken_for_the_instance(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    data = handle.data | {"child": os.getpid(), "pid": os.getpid()}
    imposter = replace(handle, data=data)
    assert (await node.driver.observe(imposter)).state is State.GONE
    await node.driver.stop(imposter, grace=timedelta(0))
    other_boot = replace(handle, data=handle.data | {"boot": "another"})
    assert (await node.driver.observe(other_boot)).state is State.GONE
    await node.driver.stop(other_boot, grace=timedelta(0))
    assert (await node.driver.observe(handle)).state is State.RUNNING


@pytest.mark.parametrize("grace", [0.0, 1.0])
async def test_stopping_and_destroying_twice_is_harmless(node: Node, grace: float) -> None:
    handle, link = await started(node.driver, spec())
    link.close()
    inside = node.inside(handle)
    for _ in range(2):
        await node.driver.stop(handle, grace=timedelta(seconds=grace))
        assert (await node.driver.observe(handle)).state is not State.RUNNING
    await node.await_end(inside)
    for _ in range(2):
        await node.driver.destroy(handle)
    assert await node.driver.handles() == []
    workspace = node.driver.workspaces.of(handle)
    kept = [workspace] if node.driver.workspaces.outlive_instances else []
    assert await node.driver.workspaces.names() == kept
    for _ in range(2):
        await node.driver.workspaces.discard(workspace)
    assert await node.driver.workspaces.names() == []


async def test_destroying_a_dead_or_stuck_instance_works(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    link.close()
    stuck = node.pid_1(handle)
    stand_still(stuck)
    await node.driver.destroy(handle)
    await node.await_end({stuck})
    second = await node.driver.ensure(spec())
    os.kill(node.pid_1(second), signal.SIGKILL)
    await node.driver.destroy(second)
    assert await node.driver.handles() == []


async def test_a_cancelled_stop_can_be_repeated(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    stopping = asyncio.create_task(node.driver.stop(handle, grace=timedelta(seconds=5)))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await node.driver.destroy(handle)
    assert await node.driver.handles() == []


# Recovery

MAKER = """
import asyncio, json, sys
from dataclasses import asdict
from pathlib import Path
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
sys.path.insert(0, {checkout!r})
from tests.contract.drivers.conftest import make_driver, spec, started

async def main():
    driver = make_driver({kind!r}, Path({data_dir!r}), {where!r})
    await driver.open()
    for ephemeral in (False, True):
        handle, link = await started(driver, spec(ephemeral=ephemeral))
        print(json.dumps(asdict(handle)), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@over_every_link
async def test_instances_outlive_a_killed_process_unless_they_are_ephemeral(node: Node) -> None:
    code = MAKER.format(
        checkout=str(unprivileged.CHECKOUT),
        kind=node.kind,
        data_dir=str(node.data_dir),
        where=node.where,
    )
    maker = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    try:
        kept, ephemeral = [Handle(**json.loads(await maker.stdout.readline())) for _ in range(2)]
        assert (await node.driver.observe(ephemeral)).state is State.RUNNING
        ending = node.pid_1(ephemeral)
    finally:
        maker.kill()
        await maker.wait()
    if node.kind not in ON_CLUSTER:  # A pod ends when nothing has been connected for minutes.
        await until(lambda: gone(node, ephemeral), "the end of the ephemeral one")
        assert ending not in living()
    driver = await node.take_over()
    assert kept in await driver.handles()
    assert (await driver.observe(kept)).state is State.RUNNING
    link = await driver.connect(kept)
    assert await printed(driver, link, "print('still here')") == "still here"
    link.close()


@everywhere
async def test_a_new_driver_finds_existing_instances(node: Node) -> None:
    handles = [await node.driver.ensure(spec()) for _ in range(2)]
    driver = await node.take_over()
    assert sorted(await driver.handles(), key=str) == sorted(handles, key=str)
    for handle in handles:
        assert (await driver.observe(handle)).state is State.RUNNING
        await driver.destroy(handle)
    assert await driver.handles() == []


async def test_a_handle_is_small_and_survives_being_stored(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    text = json.dumps(asdict(handle))
    assert len(text) < 4096
    assert (await node.driver.observe(Handle(**json.loads(text)))).state is State.RUNNING


# Limits


async def test_limits_are_changed_on_a_running_instance(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    assert await resizing_of(node.driver).resize(
        handle, replace(LIMITS, memory=256 * MiB, max_processes=64)
    )
    assert await resizing_of(node.driver).resize(handle, LIMITS)
    assert await printed(node.driver, link, "print(1)") == "1"
    if "disk_quota" in node.driver.capabilities.provides:
        assert not await resizing_of(node.driver).resize(handle, replace(LIMITS, disk=64 * MiB))
    link.close()


async def test_a_memory_kill_is_reported_once(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    assert not await node.driver.limits.out_of_memory(handle)
    request = job(node.driver, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    result = await run_over(link, request, RunOutput())
    assert result["exit_code"] != 0
    if node.counts_memory:
        assert await node.driver.limits.out_of_memory(handle)
    else:
        assert result["reason"] == "memory"
    assert not await node.driver.limits.out_of_memory(handle)
    assert await printed(node.driver, link, "print('on')") == "on"
    link.close()


async def test_a_memory_kill_is_reported_to_a_new_driver(node: Node) -> None:
    if not node.counts_memory:
        pytest.skip("the executor counts memory here, and reports it with the result")
    handle, link = await started(node.driver, spec())
    link.close()
    driver = await node.take_over()
    link = await driver.connect(handle)
    assert not await driver.limits.out_of_memory(handle)
    request = job(driver, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert (await run_over(link, request, RunOutput()))["exit_code"] != 0
    assert await driver.limits.out_of_memory(handle)
    assert 1 * MiB < (await driver.limits.memory_used(handle) or 0) < LIMITS.memory
    link.close()


@everywhere
async def test_the_executor_enforces_limits_that_the_kernel_does_not(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    limits, watch = node.driver.limits.executor_limits(handle, LIMITS)
    provides = node.driver.capabilities.provides
    assert limits["FSIZE"] == LIMITS.disk
    assert ("memory" in watch) == (not node.counts_memory)
    # A container's own limit leaves room for the executor.
    assert ("NPROC" in limits) == (node.kind != "local" or "cgroup_pids" not in provides)
    assert ("disk" in watch) == ("disk_quota" not in provides)


@on("remote")
async def test_a_watched_disk_is_watched_as_long_as_code_runs(node: Node) -> None:
    """Beside processes that the engine started, which the executor can neither read nor end."""
    if "disk_quota" in node.driver.capabilities.provides:
        pytest.skip("the engine holds the limit")
    _, link = await started(node.driver, spec())
    code = """
import time

time.sleep(1.5)  # Longer than the executor bears a process that is closed to it.
for number in range(3 * LIMIT >> 20):
    open(f"file{number}", "wb").write(bytes(1 << 20))
time.sleep(20)
"""
    request = job(node.driver, code.replace("LIMIT", str(LIMITS.disk)))
    assert (await run_over(link, request, RunOutput()))["reason"] == "disk"
    link.close()


@everywhere_durable
async def test_a_copied_workspace_can_be_used_like_the_original(node: Node) -> None:
    driver = node.driver
    if not driver.workspaces.can_copy:
        pytest.skip("clones are made from checkpoints here")
    handle, link = await started(driver, spec())
    await printed(driver, link, "open('first', 'w').write('1')")
    link.close()
    await driver.destroy(handle)
    assert await driver.workspaces.copy(driver.workspaces.of(handle), "copy")
    _, link = await started(driver, spec(workspace="copy"))
    code = """
import os
os.mkdir('new'); open('new/file', 'w').write(open('first').read()); open('first', 'a').write('2')
print(open('first').read(), {os.stat(name).st_uid for name in ('.', 'new/file', 'first')} ==
      {os.getuid()})
"""
    assert await printed(driver, link, code) == "12 True"
    link.close()


async def test_requirements_that_the_node_cannot_meet_are_refused(node: Node) -> None:
    capabilities = node.driver.capabilities
    assert capabilities.provides | set(capabilities.missing) == set(REQUIREMENTS)
    assert not capabilities.provides & set(capabilities.missing)
    for name in REQUIREMENTS:
        if name in capabilities.missing:
            with pytest.raises(InvalidRequest):
                await node.driver.check(template(require=(name,)))
        else:
            await node.driver.check(template(require=(name,)))


async def test_metrics_are_within_their_bounds(node: Node) -> None:
    for _ in range(2):
        metrics = (await node.driver.status()).load
        assert 0 <= metrics.cpu_usage <= 1
        assert 0 <= metrics.mem_usage <= 1
        assert metrics.disk_free > 0 or node.kind in ("remote", *ON_CLUSTER)


# Workspaces


@everywhere_durable
async def test_a_workspace_passes_from_one_instance_to_the_next(node: Node) -> None:
    first, link = await started(node.driver, spec())
    await printed(node.driver, link, "open('kept', 'w').write('kept')")
    link.close()
    workspace = node.driver.workspaces.of(first)
    await node.driver.destroy(first)
    assert await node.driver.workspaces.names() == [workspace]
    second, link = await started(node.driver, spec(workspace=workspace))
    assert node.driver.workspaces.of(second) == workspace
    assert await printed(node.driver, link, "print(open('kept').read())") == "kept"
    await printed(node.driver, link, "open('kept', 'a').write(' on')")
    link.close()


@durable
async def test_a_workspace_survives_an_instance_that_was_killed(node: Node) -> None:
    first, link = await started(node.driver, spec())
    code = "import os\nwith open('kept', 'w') as f:\n    f.write('kept')\n    os.fsync(f.fileno())"
    await printed(node.driver, link, code)
    os.kill(node.pid_1(first), signal.SIGKILL)
    await link.closed
    await node.driver.destroy(first)
    workspace = node.driver.workspaces.of(first)
    _, link = await started(node.driver, spec(workspace=workspace))
    assert await printed(node.driver, link, "print(open('kept').read())") == "kept"
    link.close()


async def test_a_discarded_workspace_is_removed(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    workspace = node.driver.workspaces.of(handle)
    await node.driver.destroy(handle)
    await node.driver.workspaces.discard(workspace)
    assert await node.driver.workspaces.names() == []
    with pytest.raises(NotFound):
        await node.driver.ensure(spec(workspace=workspace))
    assert await node.driver.handles() == []


# The link


@over_every_link
async def test_output_continues_after_a_lost_connection(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = (
        "import sys, time\nfor n in range(400):\n    print(n, flush=True)\n    time.sleep(0.002)\n"
        "    if n == 200: sys.stdin.readline()"
    )
    request = job(node.driver, code, stdin_open=True)
    output = RunOutput()
    running = asyncio.create_task(run_over(link, request, output))

    async def begun() -> bool:
        return b"\n20\n" in output.stdout

    await until(begun, "some output")
    link.close()
    with pytest.raises(LinkLost):
        await running
    cut = len(output.pieces)
    second = await node.driver.connect(handle)
    assert [run["id"] for run in second.hello["runs"]] == [request["id"]]
    attached = asyncio.create_task(second.attach(request["id"], output.last, output))
    await second.call("stdin", id=request["id"], data="Cg==", eof=True)
    result = await attached
    assert result["exit_code"] == 0
    assert output.stdout == b"".join(b"%d\n" % n for n in range(400))
    assert len(output.pieces) > cut
    sequences = [sequence for sequence, _, _ in output.pieces]
    assert sequences == list(range(1, len(sequences) + 1))
    second.close()


async def test_small_writes_arrive_in_few_pieces(node: Node) -> None:
    _, link = await started(node.driver, spec())
    code = "import os\nfor n in range(40_000): os.write(1 + n % 2, b'%d' % (n // 2 % 10))"
    request, received, again = job(node.driver, code), RunOutput(), RunOutput()
    result = await run_over(link, request, received)
    assert await link.attach(request["id"], 0, again) == result
    assert again.pieces == received.pieces
    assert result["sizes"] == {"1": 20_000, "2": 20_000, "3": 0}
    for channel in (1, 2):
        output = b"".join(data for _, found, data in received.pieces if found == channel)
        assert output == b"0123456789" * 2000
    assert [piece[0] for piece in received.pieces] == list(range(1, len(received.pieces) + 1))
    # Each channel once in 2 ms at most.
    assert len(received.pieces) < 10 + 2 * result["duration"] / 0.002
    link.close()


async def test_a_result_stays_in_the_journal_until_it_is_acknowledged(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    request = job(node.driver, "print('once')\ndef handler(e): return 7")
    first = await run_over(link, request, RunOutput())
    for _ in range(2):
        again = RunOutput()
        assert await link.attach(request["id"], 0, again) == first
        assert again.stdout == b"once\n"
    # The same request once more is the same run, not a second one.
    repeated = RunOutput()
    assert await run_over(link, request, repeated) == first
    link.acknowledge(request["id"])
    # Answered in order: what comes after it sees it done.
    await link.call("processes")
    with pytest.raises(ExecutorError):
        await link.attach(request["id"], 0, RunOutput())
    link.close()
    second = await node.driver.connect(handle)
    assert second.hello["runs"] == []
    second.close()


@over_every_link
async def test_two_links_serve_two_executions_concurrently(node: Node) -> None:
    handle, one = await started(node.driver, spec())
    two = await node.driver.connect(handle)
    results = await asyncio.gather(
        printed(node.driver, one, "import time; time.sleep(0.2); print('one')"),
        printed(node.driver, two, "import time; time.sleep(0.2); print('two')"),
    )
    assert list(results) == ["one", "two"]
    one.close()
    assert await printed(node.driver, two, "print('alone')") == "alone"
    two.close()


@over_every_link
async def test_a_file_larger_than_the_window_is_transferred_both_ways(node: Node) -> None:
    _, link = await started(node.driver, spec())
    content = os.urandom(5 * MiB)

    async def blocks() -> Any:
        for at in range(0, len(content), 100_000):
            yield content[at : at + 100_000]

    entry = await link.write("large.bin", blocks())
    assert entry["size"] == len(content)
    _, pieces = await link.read("large.bin")
    assert b"".join([piece async for piece in pieces]) == content
    link.close()


# Templates


@everywhere
async def test_a_preloaded_module_is_imported_before_the_code(node: Node) -> None:
    _, link = await started(node.driver, spec(template=template(preload=("decimal", "sqlite3"))))
    code = "import sys; print('decimal' in sys.modules, 'sqlite3' in sys.modules)"
    assert await printed(node.driver, link, code) == "True True"
    _, plain = await started(node.driver, spec())
    assert await printed(node.driver, plain, code) == "False False"
    link.close()
    plain.close()


async def test_the_error_contains_a_module_that_cannot_be_preloaded(node: Node) -> None:
    handle = await node.driver.ensure(spec(template=template(preload=("no_such_module", "json"))))
    with pytest.raises(PermanentError) as caught:
        await node.driver.connect(handle)
    assert caught.value.code == "preload_failed"
    assert "no_such_module" in caught.value.message
    assert "json" not in caught.value.message


@on("local")
async def test_a_template_can_have_its_own_root_file_system(node: Node) -> None:
    image = build_rootfs(node.data_dir / "rootfs" / "small")
    own = template(image=str(image))
    await node.driver.check(own)
    _, link = await started(node.driver, spec(template=own))
    code = (
        "import os, sys\n"
        "print(open('/etc/mark').read(), sys.executable, os.path.exists('/usr/bin/env'))\n"
        "open('/workspace/x', 'w').write('x')"
    )
    assert await printed(node.driver, link, code) == "from the image /usr/local/bin/python3 False"
    result = await run_over(link, job(node.driver, "open('/etc/mark', 'w')"), RunOutput())
    assert result["exit_code"] == 1
    assert (image / "etc/mark").read_text() == "from the image"
    show = "import atoll_session; print(atoll_session.messages(), end='')"
    inside = f"{show}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {show!r}])"
    assert await printed(node.driver, link, inside) == "[][]"
    link.close()


@on("local")
async def test_a_root_file_system_without_an_interpreter_is_refused(node: Node) -> None:
    empty = node.data_dir / "rootfs" / "empty"
    empty.mkdir(parents=True)
    for image in (empty, empty / "nothing"):
        with pytest.raises(InvalidRequest):
            await node.driver.check(template(image=str(image)))
