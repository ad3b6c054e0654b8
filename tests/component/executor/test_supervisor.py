"""A supervisor without a driver; the tests release its zygote."""

from __future__ import annotations

import asyncio
import venv
from pathlib import Path
from typing import Any

import pytest

from atoll.executor.runs import pipes
from atoll.link.errors import ExecutorError, LinkLost
from atoll.protocol import frames
from tests import executors
from tests.component.executor.test_interaction import Output
from tests.executors import Executor, RunOutput, job
from tests.runs import run_over

pytestmark = pytest.mark.anyio


async def test_a_run_waiting_for_the_zygote_can_be_cancelled(executor: Executor) -> None:
    link = await executor.connect()
    running = asyncio.create_task(run_over(link, job("one", "print(1)"), RunOutput()))
    await asyncio.sleep(0)
    await link.call("cancel", id="one")
    result = await asyncio.wait_for(running, 60)
    assert (result["reason"], result["exit_code"], result["artifacts"]) == ("cancelled", None, [])
    link.acknowledge("one")
    with pytest.raises(ExecutorError):
        await link.call("cancel", id="one")
    await link.call("release", zygote=link.hello["zygote"])
    assert (await run_over(link, job("two", "print(2)"), RunOutput()))["exit_code"] == 0
    link.close()


async def test_a_run_waiting_for_the_zygote_can_time_out(executor: Executor) -> None:
    link = await executor.connect()
    request = job("one", "print(1)", timeout=0.1)
    result = await asyncio.wait_for(run_over(link, request, RunOutput()), 60)
    assert result["reason"] == "timeout"
    link.close()


async def test_a_waiting_run_is_in_the_journal_for_every_connection(executor: Executor) -> None:
    first = await executor.connect()
    running = asyncio.create_task(run_over(first, job("one", "print(1)", stdin="in"), RunOutput()))
    await asyncio.sleep(0)
    await first.call("processes")
    first.close()
    with pytest.raises(LinkLost):
        await running
    second = await executor.connect()
    assert second.hello["runs"] == [{"id": "one", "ended": False}]
    output = RunOutput()
    attached = asyncio.create_task(second.attach("one", 0, output))
    await second.call("release", zygote=second.hello["zygote"])
    assert (await asyncio.wait_for(attached, 60))["exit_code"] == 0
    assert output.log == [(1, frames.STDOUT, b"1\n")]
    second.close()


async def test_more_runs_can_wait_than_are_sent_at_a_time(executor: Executor) -> None:
    link = await executor.connect()
    code = "pass\n#" + "x" * 60_000
    jobs = [run_over(link, job(str(number), code), RunOutput()) for number in range(16)]
    running = [asyncio.create_task(run) for run in jobs]
    await asyncio.sleep(0)
    await link.call("release", zygote=link.hello["zygote"])
    results = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert [result["exit_code"] for result in results] == [0] * 16
    link.close()


async def test_no_process_of_user_code_survives_in_a_session_that_is_being_saved(
    executor: Executor,
) -> None:
    link = await executor.connect_released()
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("detached", flush=True)
        while True: time.sleep(1000)
    os._exit(0)
while True: time.sleep(1000)
"""
    printed = asyncio.Event()

    class Listening(RunOutput):
        def output(self, sequence: int, channel: int, data: bytes) -> None:
            printed.set()

    running = asyncio.create_task(run_over(link, job("one", code), Listening()))
    await asyncio.wait_for(printed.wait(), 60)
    await link.call("quiet")
    result = await asyncio.wait_for(running, 60)
    assert (result["exit_code"], result["signal"]) == (None, 9)
    async with asyncio.timeout(60):
        # They are killed together, but reaped and reported one by one.
        while (await link.call("processes"))["processes"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # It still serves files.
    assert [item async for item in link.pull("scan")] == [{"cut": False, "frozen": False}]
    link.close()


async def test_a_virtual_environment_has_only_its_own_packages(
    bubblewrap: str, tmp_path: Path
) -> None:
    venv.create(tmp_path / "environment", with_pip=False, symlinks=True)
    packages = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (packages / "mine.py").write_text("word = 'mine'\n")
    output, python = RunOutput(), tmp_path / "environment" / "bin" / "python"
    code = "import mine, sys\nprint(mine.word, *sys.path, sep='\\n')"
    with executors.executor(bubblewrap, tmp_path, python=python) as started:
        link = await started.connect_released()
        await run_over(link, job("one", code), output)
        link.close()

    word, *path = b"".join(data for _, _, data in output.log).decode().splitlines()
    assert word == "mine"
    assert [entry for entry in path if entry.endswith("-packages")] == [str(packages)]


KEEPER = """
import os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0keeper")
listener.listen()
if os.fork() == 0:
    os.setsid()
    kept = []
    while True:
        peer, _ = listener.accept()
        kept.append(socket.recv_fds(peer, 1, 2)[1])
        peer.send(b"k")
"""
KEPT = """
import os, socket
for fd in (1, 2):
    left = b"x" * (1 << 20)
    while left:
        left = left[os.write(fd, left):]
peer = socket.socket(socket.AF_UNIX)
peer.connect("\\0keeper")
socket.send_fds(peer, [b"k"], [1, 2])
peer.recv(1)
"""


@pytest.mark.slow
async def test_pipes_held_open_by_a_program_keep_no_data_of_their_runs(
    executor: Executor,
) -> None:
    link = await executor.connect()
    await link.call("release", zygote=link.hello["zygote"])
    await run_over(link, job("keeper", KEEPER), RunOutput())
    link.acknowledge("keeper")

    async def run(name: str) -> None:
        assert (await run_over(link, job(name, KEPT), RunOutput()))["exit_code"] == 0
        link.acknowledge(name)

    for number in range(5):
        await run(f"first-{number}")
    size, descriptors = executor.supervisor()
    for number in range(25):
        await run(f"run-{number}")
    now, open_now = executor.supervisor()
    assert open_now > descriptors, "the outputs are not kept open, so this tests nothing"
    assert now - size < 20 << 20
    for number in range(pipes.MAX_ORPHANED // 2):
        await run(f"more-{number}")
    assert executor.supervisor()[1] < pipes.MAX_ORPHANED + 50
    link.close()


async def test_a_context_keeps_no_results_of_its_executions(executor: Executor) -> None:
    link = await executor.connect()
    await link.call("release", zygote=link.hello["zygote"])
    fields: dict[str, Any] = {
        "language": "python", "cwd": "/", "env": {"ATOLL_NO_IPYTHON": "1"},
    }  # fmt: skip
    await link.call("context_create", id="c", limits={}, watch={}, most=1, **fields)
    code = "display({'text/plain': 'x' * (7 << 20)}, raw=True)"
    sizes = []
    for number in range(6):
        name = f"run-{number}"
        request = job(name, code, context="c", results_limit=8 << 20)
        assert (await run_over(link, request, RunOutput()))["exit_code"] == 0
        link.acknowledge(name)
        sizes.append(executor.supervisor()[0])
    assert sizes[-1] - sizes[0] < 20 << 20
    link.close()


async def test_other_connections_are_closed_and_their_runs_continue(
    executor: Executor,
) -> None:
    first, second = await executor.connect_released(), await executor.connect()
    output = Output()
    code = "import sys\nprint('on', flush=True)\nprint(sys.stdin.readline(), end='')"
    running = asyncio.create_task(run_over(first, job("one", code, stdin_open=True), output))
    await output.until(b"on\n")
    for _ in range(2):
        await second.call("detach")
    with pytest.raises(LinkLost):
        await asyncio.wait_for(running, 60)
    await asyncio.wait_for(first.closed, 60)
    assert second.alive
    again = RunOutput()
    attached = asyncio.create_task(second.attach("one", 0, again))
    await second.call("stdin", id="one", data="bW9yZQo=")
    assert (await asyncio.wait_for(attached, 60))["exit_code"] == 0
    assert b"".join(data for _, _, data in again.log) == b"on\nmore\n"
    third = await executor.connect()
    assert [run["id"] for run in third.hello["runs"]] == ["one"]
    second.close()
    third.close()
