"""Freezing user code while its files are listed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.link.client import Link
from atoll.link.errors import LinkLost
from tests.component.executor.test_interaction import Output
from tests.e2e.hostile.host import eventually
from tests.executors import Executor, job
from tests.runs import run_over

pytestmark = pytest.mark.anyio

TRIES = 20
MOVES = """
import os
os.makedirs('a'); os.makedirs('m'); os.makedirs('z')
for n in range(3000): open(f'm/{n}', 'w')
open('a/token', 'w')
print('on', flush=True)
while True:
    os.rename('a/token', 'z/token')
    os.rename('z/token', 'a/token')
"""
COUNTS = """
import os, threading
def count(name):
    n = 0
    while True:
        n += 1
        with open(name, 'w') as f: f.write(str(n))
print('on', flush=True)
"""
HOSTILE = """
import os, signal, threading
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
def wake():
    while True:
        os.kill(-1, signal.SIGCONT)
def forks():
    while True:
        if os.fork() == 0:
            os._exit(0)
        os.wait()
for _ in range(3):
    if os.fork() == 0:
        wake()
for _ in range(8):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print('on', flush=True)
forks()
"""


async def running(executor: Executor, code: str) -> tuple[Link, asyncio.Task[Any], Output]:
    link, output = await executor.connect_released(), Output()
    workspace = str(executor.path.parent / "workspace")
    request = job("one", code, cwd=workspace)
    task = asyncio.create_task(run_over(link, request, output))
    await output.until(b"on\n")
    return link, task, output


async def scanned(link: Link, freeze: float | bool = True) -> tuple[list[str], dict[str, Any]]:
    text, answer = b"", {}
    async for item in link.pull("scan", freeze=freeze):
        if isinstance(item, bytes):
            text += item
        else:
            answer = item
    return [json.loads(line)[0] for line in text.splitlines()], answer


async def of_one_moment(link: Link) -> list[str]:
    """A list for which all processes were frozen; on a busy machine some attempts fail."""
    for _ in range(TRIES):
        paths, answer = await scanned(link)
        assert not answer["cut"]
        if answer["frozen"]:
            return paths
    pytest.fail("They do not stand still.")


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def goes_on(path: Path) -> None:
    """Wait until what counts in a file has counted further."""
    await asyncio.to_thread(_counts, path)


def _counts(path: Path) -> None:
    eventually(path.exists, "its beginning")
    before = path.read_text()
    eventually(lambda: path.read_text() not in ("", before), "more of it")


async def test_a_list_is_consistent(executor: Executor) -> None:
    link, task, _ = await running(executor, MOVES)
    for _ in range(5):
        paths = await of_one_moment(link)
        assert [path for path in paths if path.endswith("token")] in (["a/token"], ["z/token"])
    _, answer = await scanned(link, freeze=False)
    assert not answer["frozen"]
    assert not task.done()
    await ended(task)
    link.close()


@pytest.mark.slow
async def test_code_that_wakes_forks_and_ignores_signals_is_frozen(executor: Executor) -> None:
    link, task, _ = await running(executor, HOSTILE)
    good = [(await scanned(link))[1]["frozen"] for _ in range(10)]
    # Code that continuously wakes other processes is eventually stopped, but not in every attempt.
    if not any(good):
        await of_one_moment(link)
    await link.call("cancel", id="one", grace=0)
    assert (await asyncio.wait_for(task, 60))["reason"] == "cancelled"
    await of_one_moment(link)
    link.close()


async def test_a_process_stopped_before_stays_stopped(executor: Executor) -> None:
    code = """
import os, signal, subprocess
child = subprocess.Popen(['sleep', '1000'])
os.kill(child.pid, signal.SIGSTOP)
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
print('on', flush=True)
n = 0
while not os.path.exists('end'):
    n += 1
    with open('n', 'w') as f: f.write(str(n))
state = open(f'/proc/{child.pid}/stat').read().split()[2]
print(state, os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOHANG), flush=True)
child.kill()
"""
    link, task, output = await running(executor, code)
    workspace = executor.path.parent / "workspace"
    for _ in range(3):
        await of_one_moment(link)
        await goes_on(workspace / "n")
    (workspace / "end").touch()
    await asyncio.wait_for(task, 60)
    await output.until(b"T None\n")
    link.close()


async def test_a_shell_does_not_report_its_job_as_stopped(executor: Executor) -> None:
    code = """
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execvp('bash', ['bash', '--norc', '-i'])
os.write(fd, b"PS1=; while [ ! -e end ]; do sleep 0.01; /bin/true; done; echo a''ll\\n")
print('on', flush=True)
said = b''
while b'all' not in said:
    said += os.read(fd, 1000)
print('stopped' if b'Stopped' in said else 'fine', flush=True)
"""
    link, task, output = await running(executor, code)
    for _ in range(20):
        await of_one_moment(link)
    (executor.path.parent / "workspace/end").touch()
    await asyncio.wait_for(task, 60)
    await output.until(b"fine\n")
    link.close()


async def test_user_code_continues_when_the_holder_disconnects(executor: Executor) -> None:
    code = "for n in range(1_500): open(f'{n:0200}', 'w')\n" + COUNTS + "count('n')"
    link, task, _ = await running(executor, code)
    counted = executor.path.parent / "workspace/n"
    other = await executor.connect()
    stream = other.pull("scan", freeze=True)
    assert await anext(stream)
    other.close()
    with contextlib.suppress(LinkLost):
        await stream.aclose()  # type: ignore[attr-defined]
    await goes_on(counted)
    # Also for clients that stop reading and stay connected.
    stream = link.pull("scan", freeze=True)
    assert await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await goes_on(counted)
    await ended(task)
    link.close()


async def test_all_processes_continue_after_the_time_limit(executor: Executor) -> None:
    code = "for n in range(1_500): open(f'{n:0200}', 'w')\n" + COUNTS + "count('n')"
    link, task, _ = await running(executor, code)
    other = await executor.connect()
    stream = other.pull("scan", freeze=0.2)
    assert await anext(stream)
    await goes_on(executor.path.parent / "workspace/n")
    answer: Any = None
    async for item in stream:
        answer = item
    assert answer == {"cut": False, "frozen": False}
    await ended(task)
    other.close()
    link.close()


async def test_two_holds_share_one_freeze(executor: Executor) -> None:
    link, task, _ = await running(executor, MOVES)
    other = await executor.connect()
    for _ in range(TRIES):
        lists = await asyncio.gather(*(scanned(each) for each in (link, other, link, other)))
        frozen = [paths for paths, answer in lists if answer["frozen"]]
        for paths in frozen:
            assert len([path for path in paths if path.endswith("token")]) == 1
        if len(frozen) == len(lists):
            break
    else:
        pytest.fail("They do not stand still together.")
    await ended(task)
    link.close()
    other.close()


async def test_a_request_that_changes_files_meanwhile_is_reported(executor: Executor) -> None:
    code = "for n in range(1_500): open(f'{n:0200}', 'w')\nprint('on', flush=True)"
    link, task, _ = await running(executor, code)
    await task
    stream = link.pull("scan", freeze=True)
    assert await anext(stream)
    await link.call("mkdir", path="new", parents=False)
    answer: Any = None
    async for item in stream:
        answer = item
    assert answer == {"cut": False, "frozen": False}
    link.close()


async def test_runs_that_are_requested_meanwhile_run_afterwards(executor: Executor) -> None:
    code = "for n in range(1_500): open(f'{n:0200}', 'w')\nprint('on', flush=True)"
    link, task, _ = await running(executor, code)
    await task
    zygote = link.hello["zygote"]
    for number in range(TRIES):
        stream = link.pull("scan", freeze=True)
        assert await anext(stream)
        second = asyncio.create_task(run_over(link, job(f"two-{number}", "print(2)"), Output()))
        done, _ = await asyncio.wait([second], timeout=0.2)
        answer: Any = None
        async for item in stream:
            answer = item
        assert (await asyncio.wait_for(second, 60))["exit_code"] == 0
        if answer["frozen"]:
            assert not done
            break
    else:
        pytest.fail("They do not stand still.")
    other = await executor.connect()
    assert other.hello["zygote"] == zygote
    other.close()
    link.close()
