"""Interaction with a run: stdin, a terminal, signals, and the shutdown of its executor."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from atoll.link.client import Link
from atoll.link.errors import ExecutorError, LinkLost
from atoll.link.messages import RunResult
from atoll.protocol import frames
from atoll.settings import LinkSettings
from tests.executors import Executor, job
from tests.runs import run_over
from tests.standstill import go_on, stand_still

pytestmark = pytest.mark.anyio


class Output:
    """Receives the events of a run, and lets the test wait for output."""

    def __init__(self) -> None:
        self.data = b""
        self.pieces: list[tuple[int, int, bytes]] = []
        self.beats = 0
        self._changed = asyncio.Event()

    def started(self) -> None: ...

    def heartbeat(self) -> None:
        self.beats += 1
        self._changed.set()

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.pieces.append((sequence, channel, data))
        if channel == frames.STDOUT:
            self.data += data
        self._changed.set()

    async def until(self, text: bytes) -> None:
        await self.wait(lambda: text in self.data)

    async def wait(self, met: Any) -> None:
        async with asyncio.timeout(60):
            while not met():
                self._changed.clear()
                await self._changed.wait()


async def ready(executor: Executor) -> Link:
    link = await executor.connect()
    await link.call("release", zygote=link.hello["zygote"])
    return link


def text(data: str) -> str:
    return base64.b64encode(data.encode()).decode()


async def start(link: Link, output: Output, **fields: Any) -> asyncio.Task[RunResult]:
    """Sent when this returns, so that later requests are ordered after it."""
    request = job("one", fields.pop("code", None), **fields)
    running = asyncio.create_task(run_over(link, request, output))
    await asyncio.sleep(0)
    return running


async def test_open_stdin_receives_later_input(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"
    running = await start(link, output, code=code, stdin="first\n", stdin_open=True)
    await output.until(b"got first\n")
    await link.call("stdin", id="one", data=text("second\n"))
    await output.until(b"got second\n")
    await link.call("stdin", id="one", data=text("third"), eof=True)
    assert (await running)["exit_code"] == 0
    assert output.data == b"got first\ngot second\ngot third"
    with pytest.raises(ExecutorError) as refused:
        await link.call("stdin", id="one", data=text("late"))
    assert refused.value.code == "not_running"
    link.close()


async def test_unread_input_is_limited(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    running = await start(link, output, code="import time; time.sleep(60)", stdin_open=True)
    megabyte = base64.b64encode(b"x" * (1 << 20)).decode()
    await link.call("stdin", id="one", data=megabyte)
    with pytest.raises(ExecutorError) as refused:
        await link.call("stdin", id="one", data=megabyte)
    assert refused.value.code == "stdin_full"
    await link.call("cancel", id="one")
    assert (await running)["reason"] == "cancelled"
    link.close()


async def test_stdin_that_was_not_kept_open_is_closed(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    running = await start(link, output, code="print('up', flush=True)\nimport time\ntime.sleep(60)")
    await output.until(b"up")
    with pytest.raises(ExecutorError) as refused:
        await link.call("stdin", id="one", data=text("x"))
    assert refused.value.code == "stdin_closed"
    with pytest.raises(ExecutorError) as refused:
        await link.call("resize", id="one", rows=1, cols=1)
    assert refused.value.code == "no_terminal"
    await link.call("cancel", id="one")
    await running
    link.close()


async def test_a_terminal_takes_keys_and_can_be_resized(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    command = ["bash", "--norc", "--noprofile", "-i"]
    running = await start(link, output, kind="command", command=command, terminal=[30, 90], env={})
    await link.call("stdin", id="one", data=text("tty; stty size; echo $((6*7))\n"))
    await output.until(b"30 90\r\n42\r\n")
    assert b"/dev/pts/" in output.data
    await link.call("resize", id="one", rows=50, cols=132)
    await link.call("stdin", id="one", data=text("stty size\n"))
    await output.until(b"50 132\r\n")
    await link.call("stdin", id="one", data=text("sh -c \"echo be''gun; exec sleep 60\"\n"))
    await output.until(b"begun\r\n")
    seen = len(output.data)
    await link.call("stdin", id="one", data=text("\x03"))
    # What was typed before the interrupt goes with it.
    await output.wait(lambda: output.data[seen:].count(b"$ ") or output.data[seen:].count(b"# "))
    await link.call("stdin", id="one", data=text("echo st''ill $?\n"))
    await output.until(b"still 130\r\n")
    await link.call("stdin", id="one", data="", eof=True)
    assert (await running)["exit_code"] == 0
    link.close()


async def test_a_signal_reaches_the_foreground_process_of_the_terminal(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    script = "trap 'echo heard' INT; echo waiting; while :; do sleep 0.1; done"
    running = await start(link, output, kind="shell", code=script, terminal=[24, 80])
    await output.until(b"waiting\r\n")
    await link.call("signal", id="one", signal=int(signal.SIGINT))
    await output.until(b"heard\r\n")
    await link.call("cancel", id="one")
    await running
    link.close()


async def test_a_terminal_keeps_the_latest_output(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    script = "i=0; while [ $i -lt 20000 ]; do echo line-$i; i=$((i+1)); done; echo done; read x"
    fields = {"kind": "shell", "code": script, "terminal": [24, 80], "output_limit": 10_000}
    running = await start(link, output, **fields)
    await output.until(b"done\r\n")
    late = Output()
    second = await executor.connect()
    following = asyncio.create_task(second.attach("one", 0, late))
    await late.until(b"done\r\n")
    assert len(late.data) < 10_000 + frames.CHUNK
    assert late.pieces[0][0] > 1
    assert output.data.endswith(late.data)
    await link.call("stdin", id="one", data=text("\n"))
    assert (await running)["entries"] == (await following)["entries"] == late.pieces[-1][0]
    link.close()
    second.close()


async def test_a_silent_run_sends_heartbeats(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    running = await start(link, output, code="import time; time.sleep(60)", heartbeat=0.05)
    await output.wait(lambda: output.beats > 2)
    await link.call("cancel", id="one")
    await running
    link.close()


async def test_a_function_is_called_by_its_name(executor: Executor, tmp_path: Path) -> None:
    link = await ready(executor)
    (tmp_path / "mine.py").write_text("def work(event):\n    return len(event)\n")
    body = base64.b64encode(b"\x00\xff raw").decode()
    other = "def other(event): return event"
    cases: list[tuple[str | None, dict[str, Any], bytes]] = [
        (f"{other}['a']", {"function": "other", "event": {"a": 5}}, b"V5"),
        (f"{other}[1]", {"function": "other", "body": body}, b"V255"),
        (None, {"function": "mine:work", "cwd": str(tmp_path), "body": body}, b"V6"),
    ]
    for number, (code, fields, value) in enumerate(cases):
        output = Output()
        request = job(f"run-{number}", code, **fields)
        assert (await run_over(link, request, output))["exit_code"] == 0
        assert [data for _, channel, data in output.pieces if channel == frames.VALUE] == [value]
    output = Output()
    result = await run_over(link, job("missing", "x = 1", function="other"), output)
    assert result["exit_code"] == 1
    assert b"function_not_found" in output.pieces[0][2] + output.pieces[-1][2]
    link.close()


async def test_a_shutdown_reports_which_runs_crashed(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "print('up', flush=True)\nimport time\ntime.sleep(60)"
    running = await start(link, output, code=code)
    await output.until(b"up")
    child = executor.children()[0]
    os.kill(child, signal.SIGTERM)
    result = await asyncio.wait_for(running, 60)
    assert (result["reason"], result["signal"]) == ("shutdown", signal.SIGKILL)
    assert await executor.exit_code() == 143


async def test_code_inside_cannot_end_the_executor(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "import os, time\nos.kill(1, 15)\ntime.sleep(0.3)\nprint('here')"
    running = await start(link, output, code=code)
    assert (await running)["exit_code"] == 0
    assert (await link.call("processes"))["processes"] == []
    link.close()


async def test_a_link_to_a_silent_executor_is_closed_and_can_be_opened_again(
    executor: Executor,
) -> None:
    link, output, (child,) = await ready(executor), Output(), executor.children()
    running = await start(link, output, code="print(1, flush=True)\ninput()", stdin_open=True)
    await output.until(b"1")
    hasty = await executor.connect(LinkSettings(lost_after=timedelta(seconds=0.5)))
    stand_still(child)
    try:
        with pytest.raises(LinkLost):
            await asyncio.wait_for(hasty.attach("one", 0, Output()), 60)
    finally:
        go_on(child)
    again = await executor.connect()
    following = asyncio.create_task(again.attach("one", output.pieces[-1][0], output))
    await again.call("stdin", id="one", data=text("\n"))
    assert (await following)["exit_code"] == 0
    assert (await running)["exit_code"] == 0
    again.close()
    link.close()
