"""A supervisor of its own, whose zygote nobody releases until the test does."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers import bundle
from atoll.executor import runs
from atoll.link.client import ExecutorError, Link, LinkLost
from atoll.settings import LinkSettings

pytestmark = pytest.mark.anyio


class Heard:
    def __init__(self) -> None:
        self.output_seen = b""

    def started(self) -> None: ...

    def heartbeat(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.output_seen += data


class Executor:
    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._process = process

    def children(self) -> list[int]:
        """Pids of PID 1 of the namespace, seen from outside."""
        pid = self._process.pid
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def supervisor(self) -> tuple[int, int]:
        """Resident bytes and open descriptors of PID 1."""
        (pid,) = self.children()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self._process.wait, 10)

    async def connect(self) -> Link:
        return await Link.connect(str(self.path), LinkSettings(), timeout=timedelta(seconds=10))


@pytest.fixture
async def executor(bubblewrap: str, tmp_path: Path) -> AsyncIterator[Executor]:
    (tmp_path / "workspace").mkdir()
    path = tmp_path / "link.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    config = {"listen_fd": listener.fileno(), "root": str(tmp_path / "workspace"), "hooks": False}
    boot = bundle.BOOT.format(path=str(bundle.write(tmp_path)))
    process = subprocess.Popen(  # noqa: ASYNC220 - a fixture, with nothing beside it
        [
            bubblewrap, "--unshare-pid", "--as-pid-1", "--die-with-parent", "--dev-bind", "/", "/",
            "--proc", "/proc", sys.executable, "-I", "-S", "-c", boot, json.dumps(config),
        ],
        pass_fds=[listener.fileno()],
    )  # fmt: skip
    listener.close()
    yield Executor(path, process)
    process.kill()
    process.wait()


def job(name: str, code: str | None, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "id": name, "kind": "python", "code": code, "command": None, "event": {}, "stdin": None,
        "args": [], "env": {}, "cwd": "/", "timeout": 30.0, "output_limit": 1 << 20,
        "return_limit": 1 << 20, "artifact_limit": 10, "limits": {}, "watch": {},
    }  # fmt: skip
    return base | fields


async def test_a_run_that_waits_for_the_zygote_can_be_cancelled(executor: Executor) -> None:
    link = await executor.connect()
    running = asyncio.create_task(link.run(job("one", "print(1)"), Heard()))
    await asyncio.sleep(0)
    await link.call("cancel", id="one")
    result = await asyncio.wait_for(running, 5)
    assert (result["reason"], result["exit_code"], result["artifacts"]) == ("cancelled", None, [])
    link.acknowledge("one")
    with pytest.raises(ExecutorError):
        await link.call("cancel", id="one")
    await link.call("release", zygote=link.hello["zygote"])
    assert (await link.run(job("two", "print(2)"), Heard()))["exit_code"] == 0
    link.close()


async def test_a_run_that_waits_for_the_zygote_has_a_deadline(executor: Executor) -> None:
    link = await executor.connect()
    request = job("one", "print(1)", timeout=0.1)
    result = await asyncio.wait_for(link.run(request, Heard()), 5)
    assert result["reason"] == "timeout"
    link.close()


async def test_a_run_that_waits_is_in_the_journal_whoever_sent_it(executor: Executor) -> None:
    first = await executor.connect()
    running = asyncio.create_task(first.run(job("one", "print(1)", stdin="in"), Heard()))
    await asyncio.sleep(0)
    await first.call("processes")
    first.close()
    with pytest.raises(LinkLost):
        await running
    second = await executor.connect()
    assert second.hello["runs"] == [{"id": "one", "ended": False}]
    heard = Heard()
    attached = asyncio.create_task(second.attach("one", 0, heard))
    await second.call("release", zygote=second.hello["zygote"])
    assert (await asyncio.wait_for(attached, 10))["exit_code"] == 0
    assert heard.output_seen == b"1\n"
    second.close()


async def test_more_runs_may_wait_than_are_handed_over_at_a_time(executor: Executor) -> None:
    link = await executor.connect()
    code = "pass\n#" + "x" * 60_000
    jobs = [link.run(job(str(number), code), Heard()) for number in range(16)]
    running = [asyncio.create_task(run) for run in jobs]
    await asyncio.sleep(0)
    await link.call("release", zygote=link.hello["zygote"])
    results = await asyncio.wait_for(asyncio.gather(*running), 20)
    assert [result["exit_code"] for result in results] == [0] * 16
    link.close()


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


async def test_outputs_that_a_program_keeps_open_keep_nothing_of_their_runs(
    executor: Executor,
) -> None:
    link = await executor.connect()
    await link.call("release", zygote=link.hello["zygote"])
    await link.run(job("keeper", KEEPER), Heard())
    link.acknowledge("keeper")

    async def run(name: str) -> None:
        assert (await link.run(job(name, KEPT), Heard()))["exit_code"] == 0
        link.acknowledge(name)

    for number in range(5):
        await run(f"first-{number}")
    size, descriptors = executor.supervisor()
    for number in range(25):
        await run(f"run-{number}")
    now, open_now = executor.supervisor()
    assert open_now > descriptors, "the outputs are not kept open, so this tests nothing"
    assert now - size < 20 << 20
    for number in range(runs.MAX_LEFT // 2):
        await run(f"more-{number}")
    assert executor.supervisor()[1] < runs.MAX_LEFT + 50
    link.close()


async def test_a_context_keeps_nothing_of_what_its_executions_showed(executor: Executor) -> None:
    link = await executor.connect()
    await link.call("release", zygote=link.hello["zygote"])
    fields = {"language": "python", "cwd": "/", "env": {"ATOLL_NO_IPYTHON": "1"}}
    await link.call("context_create", id="c", limits={}, watch={}, most=1, **fields)
    code = "display({'text/plain': 'x' * (7 << 20)}, raw=True)"
    sizes = []
    for number in range(6):
        name = f"run-{number}"
        request = job(name, code, context="c", results_limit=8 << 20)
        assert (await link.run(request, Heard()))["exit_code"] == 0
        link.acknowledge(name)
        sizes.append(executor.supervisor()[0])
    assert sizes[-1] - sizes[0] < 20 << 20
    link.close()
