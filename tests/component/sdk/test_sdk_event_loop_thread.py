from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from atoll.sdk.event_loop_thread import EventLoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from atoll import Atoll

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def loop_thread() -> Iterator[EventLoopThread]:
    loop_thread = EventLoopThread()
    yield loop_thread
    loop_thread.stop()


def test_the_generated_client_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "generate-sync"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_atoll_loads_no_http_client() -> None:
    code = "import sys, atoll; assert not {'httpx', 'pydantic', 'asyncio'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_work_while_an_event_loop_is_running(atoll: Atoll) -> None:
    async def cell() -> str:
        with atoll.session() as session:
            return session.run("hello").stdout

    assert asyncio.run(cell()) == "hello"


def test_many_threads_can_call_concurrently(atoll: Atoll) -> None:
    def work(number: int) -> str:
        with atoll.session() as session:
            return session.run(str(number)).stdout

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(32))) == [str(number) for number in range(32)]


def test_an_interrupt_cancels_the_call_and_waits_for_its_end(loop_thread: EventLoopThread) -> None:
    seen: list[str] = []

    async def hang() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        loop_thread.call(hang)
    assert seen == ["cleaned up"]


def test_callbacks_run_in_the_thread_of_the_caller_and_can_make_calls(
    loop_thread: EventLoopThread,
) -> None:
    threads: list[threading.Thread] = []

    async def double(number: int) -> int:
        return number * 2

    async def ask(callback: Callable[[int], object]) -> object:
        answer = callback(21)
        assert isinstance(answer, asyncio.Future)
        return await answer

    def answer(number: int) -> int:
        threads.append(threading.current_thread())
        return loop_thread.call(double, number)

    assert loop_thread.call(ask, answer) == 42
    assert threads == [threading.current_thread()]


def test_an_error_in_a_callback_ends_the_call_and_propagates(loop_thread: EventLoopThread) -> None:
    ended = threading.Event()

    async def ask(callback: Callable[[], object]) -> None:
        try:
            answer = callback()
            assert isinstance(answer, asyncio.Future)
            await answer
        finally:
            ended.set()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop_thread.call(ask, fail)
    assert ended.is_set()


def test_an_abandoned_iteration_is_closed(loop_thread: EventLoopThread) -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    for number in loop_thread.iterate(numbers()):
        if number == 2:
            break
    gc.collect()
    assert closed == [True]
    assert list(loop_thread.iterate(numbers())) == list(range(100))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_a_context_manager_always_exits_on_the_loop(
    loop_thread: EventLoopThread, error: type[BaseException] | None
) -> None:
    seen: list[object] = []

    @asynccontextmanager
    async def context() -> AsyncIterator[int]:
        try:
            yield 1
        except BaseException as problem:
            await asyncio.sleep(0)
            seen.append(type(problem))
            raise
        seen.append(None)

    if error is None:
        with loop_thread.context(context()) as value:
            assert value == 1
        assert seen == [None]
    else:
        with pytest.raises(error), loop_thread.context(context()):
            raise error
        assert seen == [error if issubclass(error, Exception) else asyncio.CancelledError]


def test_context_variables_of_the_caller_are_seen(loop_thread: EventLoopThread) -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace")
    trace.set("here")

    async def look() -> str:
        return trace.get()

    assert loop_thread.call(look) == "here"


def test_a_closed_loop_thread_ends_running_calls_and_refuses_new_ones() -> None:
    loop_thread = EventLoopThread()
    running = threading.Event()

    async def hang() -> None:
        running.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(loop_thread.call, hang)
        running.wait()
        loop_thread.stop()
        with pytest.raises(RuntimeError, match="closed during"):
            call.result()
    with pytest.raises(RuntimeError, match="closed"):
        loop_thread.call(hang)


def test_a_loop_thread_without_references_ends_its_thread() -> None:
    loop_thread = EventLoopThread()

    async def here() -> threading.Thread:
        return threading.current_thread()

    thread = loop_thread.call(here)
    del loop_thread
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_program_that_closes_nothing_shuts_down_cleanly() -> None:
    code = """
import asyncio
from atoll.sdk.event_loop_thread import EventLoopThread

loop_thread = EventLoopThread()
tasks = []

async def numbers():
    yield 1
    yield 2

async def serve():
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(print, "closed")

async def start():
    tasks.append(asyncio.create_task(serve()))

loop_thread.call(start)
items = loop_thread.iterate(numbers())
print(next(items))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, done.stderr) == ("1\nclosed\n", "")


def test_an_interrupt_that_coincides_with_the_result_does_not_hang(
    loop_thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(SimpleQueue[object]):
        """Interrupts as the last item leaves the queue: it is removed, but not returned."""

        late = True

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            item = super().get(block, timeout)
            if item is None and self.late:
                self.late = False
                raise KeyboardInterrupt
            return item

    async def answer() -> int:
        return 1

    monkeypatch.setattr("atoll.sdk.event_loop_thread.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop_thread.call(answer)
