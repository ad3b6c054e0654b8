"""Jobs that a child of the zygote receives before it dies without announcing them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from atoll.executor.interpreter import jobs
from atoll.link.client import Link
from atoll.protocol import frames
from tests.executors import Executor, RunOutput, job
from tests.runs import run_over

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="only root can open a process that is not dumpable"
    ),
]

PIDFD_GETFD = 438


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Thief:
    """Receives the next job in place of the zygote's waiting child, and never announces it."""

    def __init__(self, executor: Executor) -> None:
        (supervisor,) = executor.children()
        (self._zygote,) = children(supervisor)
        sockets = []
        for entry in Path(f"/proc/{self._zygote}/fd").iterdir():
            with suppress(FileNotFoundError):  # Of a module that it is importing.
                if os.readlink(entry).startswith("socket:"):
                    sockets.append(int(entry.name))
        process = os.pidfd_open(self._zygote)
        # Control and jobs, in the order in which the supervisor made them.
        fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, max(sockets), 0)
        os.close(process)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        self._jobs = socket.socket(fileno=fd)
        self._jobs.setblocking(True)

    async def stop_the_spare(self) -> None:
        async with asyncio.timeout(60):
            while not children(self._zygote):  # noqa: ASYNC110 - it is forked after the result
                await asyncio.sleep(0.001)
        for pid in children(self._zygote):
            os.kill(pid, signal.SIGSTOP)

    async def take(self) -> None:
        def receive() -> None:
            _, _, descriptors = jobs.receive(self._jobs)
            for fd in descriptors:
                os.close(fd)
            self._jobs.close()

        await asyncio.wait_for(asyncio.to_thread(receive), 60)


async def lose(link: Link, executor: Executor, request: dict[str, Any], heard: RunOutput) -> Any:
    """Begin a run whose first hand-over is lost."""
    await run_over(link, job("first", "pass"), RunOutput())
    thief = Thief(executor)
    await thief.stop_the_spare()
    running = asyncio.create_task(run_over(link, request, heard))
    await thief.take()
    return running


async def test_a_lost_job_is_sent_again_and_runs_once(executor: Executor) -> None:
    link, output = await executor.connect_released(), RunOutput()
    code = "import sys\nprint(sys.stdin.read())"
    request = job("one", code, stdin="in")
    running = await lose(link, executor, request, output)
    result = await asyncio.wait_for(running, 60)
    assert (result["exit_code"], result["reason"]) == (0, None)
    assert output.log == [(1, frames.STDOUT, b"in\n")]
    link.close()


async def test_input_written_to_a_lost_job_is_not_lost(executor: Executor) -> None:
    link, output = await executor.connect_released(), RunOutput()
    request = job("one", "import sys\nprint(sys.stdin.read())", stdin_open=True)
    running = await lose(link, executor, request, output)
    await link.call("stdin", id="one", data="ZWFybHk=", eof=True)
    assert (await asyncio.wait_for(running, 60))["exit_code"] == 0
    assert output.log == [(1, frames.STDOUT, b"early\n")]
    link.close()


async def test_a_lost_job_that_is_cancelled_does_not_start(executor: Executor) -> None:
    link, output = await executor.connect_released(), RunOutput()
    running = await lose(link, executor, job("one", "print(1)"), output)
    await link.call("cancel", id="one")
    result = await asyncio.wait_for(running, 60)
    assert (result["reason"], result["exit_code"], output.log) == ("cancelled", None, [])
    assert (await run_over(link, job("two", "pass"), RunOutput()))["exit_code"] == 0
    link.close()


async def test_a_lost_context_is_started_again(executor: Executor) -> None:
    link = await executor.connect_released()
    await run_over(link, job("first", "pass"), RunOutput())
    thief = Thief(executor)
    await thief.stop_the_spare()
    fields: dict[str, Any] = {"language": "python", "cwd": "/", "env": {}}
    creating = asyncio.create_task(
        link.call("context_create", id="c", limits={}, watch={}, most=1, **fields)
    )
    await thief.take()
    await asyncio.wait_for(creating, 60)
    result = await run_over(link, job("one", "1", context="c", results_limit=1 << 20), RunOutput())
    assert result["exit_code"] == 0
    link.close()
