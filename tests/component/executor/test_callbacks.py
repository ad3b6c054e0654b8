"""The executor's HTTP callbacks, against a small web server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atoll.executor.callbacks import RESULT_DELAY
from tests.executors import Executor, RunOutput, executor, job
from tests.host_processes import below, processes
from tests.runs import run_over
from tests.standstill import go_on, stand_still

pytestmark = pytest.mark.anyio

TOKEN = "atollinst.a-token-that-must-stay-secret-0123456789"


class Post(NamedTuple):
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Address:
    """Accepts reports, with configured responses for each path."""

    def __init__(self) -> None:
        self.posts: queue.Queue[Post] = queue.Queue()
        self.answers: dict[str, list[int]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        address = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                address.posts.put(Post(self.path, headers, json.loads(body)))
                answers = address.answers.get(self.path)
                self.send_response(answers.pop(0) if answers else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler

    async def next(self, path: str, seconds: float = 60) -> Post:
        """The next post to a path; those to others are passed over."""
        while True:
            post = await asyncio.to_thread(self.posts.get, timeout=seconds)
            if post.path == path:
                return post

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def address() -> Iterator[Address]:
    made = Address()
    yield made
    made.close()


@pytest.fixture
async def program(bubblewrap: str, tmp_path: Path, address: Address) -> AsyncIterator[Executor]:
    callback = {
        "instance": "inst_1", "url": f"{address.url}/at/", "token": TOKEN, "loopback": True,
    }  # fmt: skip
    with executor(bubblewrap, tmp_path, journal=True, callback=callback) as running:
        yield running
    await running.disconnect()


def path(run: str, what: str) -> str:
    return f"/at/internal/executions/{run}/{what}"


async def test_readiness_is_reported_once(program: Executor, address: Address) -> None:
    post = await address.next("/at/internal/instances/inst_1/ready")
    assert post.headers["authorization"] == f"Bearer {TOKEN}"
    assert post.headers["idempotency-key"] == "inst_1_ready"
    link = await program.connect_released()
    link.close()
    with pytest.raises(queue.Empty):
        await address.next(post.path, 1)


async def test_an_unacknowledged_result_is_posted_with_its_complete_log(
    program: Executor, address: Address
) -> None:
    link = await program.connect_released()
    output = RunOutput()
    code = "input()\nprint('x' * 200_000)\ndef handler(event): return 1"
    running = asyncio.create_task(run_over(link, job("one", code, stdin_open=True), output))
    status = await address.next(path("one", "status"))
    assert status.body == {"status": "running"}
    await link.call("stdin", id="one", data=base64.b64encode(b"\n").decode())
    result = await running
    link.close()
    post = await address.next(path("one", "result"))
    assert post.headers["idempotency-key"] == "one_result"
    assert post.headers["authorization"] == f"Bearer {TOKEN}"
    assert post.body["result"] == result
    log = [(number, channel, base64.b64decode(data)) for number, channel, data in post.body["log"]]
    assert log == output.log


async def test_an_acknowledged_result_is_not_reported(program: Executor, address: Address) -> None:
    link = await program.connect_released()
    for number in range(20):
        taken, started = f"taken-{number}", time.monotonic()
        await run_over(link, job(taken, "print(1)"), RunOutput())
        link.acknowledge(taken)
        await link.call("processes")
        if time.monotonic() - started < RESULT_DELAY:
            break
    else:
        pytest.fail("No result was taken in time.")
    await run_over(link, job("left", "print(2)"), RunOutput())
    link.close()
    seen: list[str] = []
    while not seen or seen[-1] != path("left", "result"):
        seen.append((await asyncio.to_thread(address.posts.get, timeout=60)).path)
    assert path(taken, "result") not in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "tries"), [([503, 500], 3), ([409], 1), ([404], 1), ([401], 1)]
)
async def test_a_report_is_repeated_until_it_is_answered(
    program: Executor, address: Address, answers: list[int], tries: int
) -> None:
    address.answers[path("one", "result")] = list(answers)
    link = await program.connect_released()
    await run_over(link, job("one", "print(1)"), RunOutput())
    for _ in range(tries):
        await address.next(path("one", "result"))
    with pytest.raises(queue.Empty):
        await address.next(path("one", "result"), 1.5)
    # Whatever the receiver did with it, the link still finds it.
    assert (await link.attach("one", 0, RunOutput()))["exit_code"] == 0
    link.close()


@pytest.mark.slow
async def test_an_acknowledgement_ends_the_retries(program: Executor, address: Address) -> None:
    address.answers[path("one", "result")] = [503] * 10
    link = await program.connect_released()
    await run_over(link, job("one", "print(1)"), RunOutput())
    await address.next(path("one", "result"))
    link.acknowledge("one")
    await link.call("processes")
    while not address.posts.empty():
        address.posts.get()
    with contextlib.suppress(queue.Empty):
        await address.next(path("one", "result"), 3)
        # That one was on its way.
        with pytest.raises(queue.Empty):
            await address.next(path("one", "result"), 3)
    link.close()


@pytest.mark.slow
async def test_running_executions_are_reported_by_heartbeats(
    program: Executor, address: Address
) -> None:
    link = await program.connect_released()
    running = asyncio.create_task(
        run_over(link, job("one", "import time\ntime.sleep(60)"), RunOutput())
    )
    post = await address.next(path("one", "heartbeat"))
    assert post.headers["idempotency-key"] == "one_heartbeat"
    await link.call("cancel", id="one")
    assert (await running)["reason"] == "cancelled"
    link.close()


def named(program: Executor, name: str) -> list[int]:
    every = processes()
    return [pid for pid in below(program.process.pid) if every.get(pid, (0, "", ""))[2] == name]


async def test_a_reporter_killed_by_user_code_is_replaced(
    program: Executor, address: Address
) -> None:
    await address.next("/at/internal/instances/inst_1/ready")
    (before,) = named(program, "reporter")
    link = await program.connect_released()
    kill = (
        "import os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if open('/proc/%s/comm' % pid).read() == 'reporter\\n':\n"
        "        os.kill(int(pid), signal.SIGKILL)\n"
    )
    assert (await run_over(link, job("one", kill), RunOutput()))["exit_code"] == 0
    await address.next(path("one", "result"))
    (after,) = named(program, "reporter")
    assert after != before
    link.close()


async def test_a_reporter_stopped_by_user_code_blocks_nothing_else(
    program: Executor, address: Address
) -> None:
    await address.next("/at/internal/instances/inst_1/ready")
    (reporter,) = named(program, "reporter")
    link = await program.connect_released()
    stand_still(reporter)
    for number in range(3):
        await run_over(link, job(str(number), "print(1)"), RunOutput())
    go_on(reporter)
    await address.next(path("2", "result"))
    link.close()


SEARCH = """
import os, re
# Not in one piece, lest it find itself.
wanted = re.compile(b'a-token-that-must-sta[y]-secret')
found = []
for pid in [*filter(str.isdigit, os.listdir('/proc'))]:
    if open('/proc/%s/comm' % pid).read() == 'reporter\\n':
        continue
    for name in ('cmdline', 'environ'):
        try:
            if wanted.search(open('/proc/%s/%s' % (pid, name), 'rb').read()):
                found.append((pid, name))
        except OSError:
            pass
    try:
        memory = open('/proc/%s/mem' % pid, 'rb', buffering=0)
        maps = open('/proc/%s/maps' % pid).read()
    except OSError:
        continue
    for line in maps.splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split('-'))
        if ' rw' not in line:
            continue
        try:
            memory.seek(low)
            data = memory.read(high - low)
        except (OSError, OverflowError, ValueError):
            continue
        if wanted.search(data):
            found.append((pid, line))
for fd in range(3, 64):
    try:
        if wanted.search(os.pread(fd, 65536, 0)):
            found.append(fd)
    except OSError:
        pass
print(found)
"""


@pytest.mark.parametrize("replaced", [False, True], ids=["first zygote", "second zygote"])
async def test_user_code_cannot_find_the_token(
    program: Executor, address: Address, replaced: bool
) -> None:
    # This program runs as root and may read all memory: only the reporter has the token.
    await address.next("/at/internal/instances/inst_1/ready")
    link = await program.connect_released()
    if replaced:
        # A zygote that begins later has a copy of what PID 1 has in memory by then.
        renewed = asyncio.get_running_loop().create_future()
        link.observe_zygotes(renewed.set_result)
        kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()"
        await run_over(link, job("kill", kill), RunOutput())
        await link.call("release", zygote=await renewed)
        await address.next(path("kill", "result"))
    output = RunOutput()
    result = await run_over(link, job("look", SEARCH, env={"NOBODY": "1"}), output)
    assert result["exit_code"] == 0, output.log
    assert b"".join(data for _, channel, data in output.log if channel == 1) == b"[]\n"
    link.close()


async def test_the_token_is_not_sent_to_the_sandbox_s_own_loopback(
    bubblewrap: str, tmp_path: Path, address: Address
) -> None:
    callback = {"instance": "inst_1", "url": address.url, "token": TOKEN}
    with executor(bubblewrap, tmp_path, callback=callback) as program:
        link = await program.connect_released()
        await run_over(link, job("one", "print(1)"), RunOutput())
        with pytest.raises(queue.Empty):
            await asyncio.to_thread(address.posts.get, timeout=2)
        link.close()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://", "nonsense", "http://127.0.0.1:1"])
async def test_an_invalid_url_does_no_harm(bubblewrap: str, tmp_path: Path, url: str) -> None:
    callback = {"instance": "inst_1", "url": url, "token": TOKEN, "loopback": True}
    with executor(bubblewrap, tmp_path, callback=callback) as program:
        link = await program.connect_released()
        for number in range(5):
            result = await run_over(link, job(str(number), "print(1)"), RunOutput())
            assert result["exit_code"] == 0
            link.acknowledge(str(number))
        link.close()
