"""Following a run at the caller's pace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.link.client import Piece
from atoll.link.errors import ExecutorError, LinkLost, LinkSaturated
from atoll.protocol import frames
from tests.component.executor.test_interaction import Output, ready, start, text
from tests.executors import Executor, job
from tests.runs import run_over

pytestmark = pytest.mark.anyio

MEGABYTE = 1 << 20


async def test_a_watcher_receives_earlier_and_later_output(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "import sys\nprint('first', flush=True)\nsys.stderr.write(sys.stdin.readline())"
    running = await start(link, output, code=code, stdin_open=True)
    await output.until(b"first\n")
    events: list[str] = []
    pieces: list[Piece] = []
    result: dict[str, Any] = {}
    async for item in link.watch("one", 0):
        if isinstance(item, Piece):
            if not pieces:
                await link.call("stdin", id="one", data=text("more\n"))
            pieces.append(item)
        else:
            events.append(item["event"])
            result = item.get("result", {})
    assert [(piece.channel, piece.data.strip()) for piece in pieces] == [
        (frames.STDOUT, b"first"),
        (frames.STDERR, b"more"),
    ]
    assert [piece.sequence for piece in pieces] == [1, 2]
    assert (events[0], events[-1]) == ("started", "end")
    assert result == await running
    link.close()


async def test_a_returning_watcher_continues_after_the_last_piece(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "for n in range(200): print(n, 'x' * 5000, flush=True)"
    await (await start(link, output, code=code, output_limit=2 * MEGABYTE))
    received, last = b"", 0
    while True:
        other = await executor.connect()
        taken = 0
        ended = False
        async for item in other.watch("one", last):
            if isinstance(item, Piece):
                received, last, taken = received + item.data, item.sequence, taken + 1
                if taken == 3:
                    break
            ended = isinstance(item, dict) and item["event"] == "end"
        other.close()
        if ended:
            break
    assert received == output.data
    link.close()


async def test_a_slow_watcher_of_pipes_loses_nothing_and_delays_no_other(
    executor: Executor,
) -> None:
    link, output = await ready(executor), Output()
    slow = await executor.connect()
    code = "import sys\nprint('first', flush=True)\nsys.stdin.readline()\nprint('y' * 6_000_000)"
    fields: dict[str, Any] = {"stdin_open": True, "output_limit": 8 * MEGABYTE}
    running = await start(link, output, code=code, **fields)
    watching = slow.watch("one", 0, expected=True)
    first = await anext(item async for item in watching if isinstance(item, Piece))
    await link.call("stdin", id="one", data=text("\n"))
    assert (await asyncio.wait_for(running, 60))["exit_code"] == 0
    # What waits here is no more than a window, however much there is.
    (stream,) = slow._transport._streams.values()
    assert stream.inbox is not None
    assert stream.inbox.waiting <= 2 * frames.WINDOW
    received = first.data
    async for item in watching:
        if isinstance(item, Piece):
            received += item.data
    assert received == output.data
    link.close()
    slow.close()


async def test_a_slow_watcher_of_a_terminal_misses_old_output(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    slow = await executor.connect()
    script = "echo first; read x; yes line | head -c 20000000; echo; echo last"
    fields = {"kind": "shell", "code": script, "terminal": [24, 80], "output_limit": 100_000}
    running = await start(link, output, **fields)
    watching = slow.watch("one", 0, expected=True)
    pieces = [await anext(item async for item in watching if isinstance(item, Piece))]
    await link.call("stdin", id="one", data=text("\n"))
    assert (await asyncio.wait_for(running, 60))["exit_code"] == 0
    pieces += [item async for item in watching if isinstance(item, Piece)]
    sequences = [piece.sequence for piece in pieces]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] - sequences[0] > len(sequences)
    assert sum(len(piece.data) for piece in pieces) < frames.WINDOW + 100_000 + frames.CHUNK * 2
    assert pieces[-1].data.endswith(b"last\r\n")
    link.close()
    slow.close()


async def test_a_watcher_can_wait_for_a_run(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    watching = link.watch("one", 0, expected=True)
    coming = asyncio.ensure_future(anext(watching))
    await link.call("processes")
    assert not coming.done()
    await (await start(link, output, code="print(1)"))
    assert await coming == {"event": "started"}
    assert [item.data async for item in watching if isinstance(item, Piece)] == [b"1\n"]
    with pytest.raises(ExecutorError) as unknown:
        await anext(link.watch("two", 0))
    assert unknown.value.code == "unknown_run"
    link.close()


async def test_a_watcher_is_informed_of_a_lost_link(executor: Executor) -> None:
    link, output = await ready(executor), Output()
    code = "print('up', flush=True)\nimport time\ntime.sleep(60)"
    running = await start(link, output, code=code)
    other = await executor.connect()
    watching = other.watch("one", 0, expected=True)
    await anext(item async for item in watching if isinstance(item, Piece))
    other.close()
    with pytest.raises(LinkLost):
        await anext(watching)
    await link.call("cancel", id="one")
    await running
    link.close()


async def test_all_watchers_receive_the_same(executor: Executor) -> None:
    link = await ready(executor)

    async def watched() -> bytes:
        pieces = link.watch("one", 0, expected=True)
        return b"".join([item.data async for item in pieces if isinstance(item, Piece)])

    watchers = [asyncio.create_task(watched()) for _ in range(20)]
    await asyncio.sleep(0)
    output = Output()
    await run_over(link, job("one", "for n in range(10000): print(n)"), output)
    assert await asyncio.gather(*watchers) == [output.data] * 20
    link.close()


@pytest.mark.parametrize("language", ["python", "command"])
async def test_code_receives_interrupts_that_its_instance_ignores(
    executor: Executor, language: str
) -> None:
    link, output = await ready(executor), Output()
    fields: dict[str, Any] = {"code": "print(open('/proc/self/status').read())"}
    if language == "command":
        fields = {"kind": "command", "command": ["cat", "/proc/self/status"]}
    await (await start(link, output, **fields))
    status = dict(line.split(b":\t", 1) for line in output.data.splitlines() if b":\t" in line)
    interrupt, quit_, hang_up = 1 << 1, 1 << 2, 1 << 0
    assert int(status[b"SigIgn"], 16) & (interrupt | quit_ | hang_up) == 0
    link.close()


async def test_watchers_leave_capacity_for_executions(executor: Executor) -> None:
    link, output = await ready(executor), Output()

    async def watch(name: str) -> None:
        async for _ in link.watch(name, 0, expected=True):
            pass

    watching = [asyncio.create_task(watch(f"run-{number}")) for number in range(1100)]
    refused, _ = await asyncio.wait(watching, timeout=0.1)
    assert len(refused) > 300
    assert all(isinstance(task.exception(), LinkSaturated) for task in refused)
    with pytest.raises(LinkSaturated):
        await link.call("list", path="/")
    running = await start(link, output, code="print(1)")
    assert (await running)["exit_code"] == 0
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    link.close()
