"""Workers continue after any failure of one key."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from atoll.errors import DatabaseUnavailable, PermanentError, TemporaryError
from atoll.reconcile.loop import work
from atoll.reconcile.queue import Queue
from atoll.reconcile.sweep import sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("every_level")]


@asynccontextmanager
async def working(
    queue: Queue, handle: Callable[[str], Awaitable[float | None]], *, workers: int = 2
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(work(queue, handle, workers=workers))
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Seen:
    """Which keys were handled, how often, and how many concurrently."""

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self.busy: set[str] = set()
        self.most = 0
        self.changed = asyncio.Event()

    def begin(self, key: str) -> None:
        assert key not in self.busy
        self.busy.add(key)
        self.most = max(self.most, len(self.busy))

    def end(self, key: str) -> None:
        self.busy.remove(key)
        self.times[key] = self.times.get(key, 0) + 1
        self.changed.set()

    async def until(self, key: str, times: int = 1) -> None:
        while self.times.get(key, 0) < times:
            self.changed.clear()
            await self.changed.wait()


async def test_a_handled_key_is_not_due_again() -> None:
    queue, seen = Queue(), Seen()

    async def handle(key: str) -> None:
        seen.begin(key)
        seen.end(key)

    async with working(queue, handle):
        queue.add("a")
        await seen.until("a")
        queue.add("b")
        await seen.until("b")
    assert seen.times == {"a": 1, "b": 1}
    assert len(queue) == 0


@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["at once", "later"])
async def test_a_key_that_is_due_again_is_handled_again(pause: float) -> None:
    queue, seen = Queue(), Seen()

    async def handle(key: str) -> float | None:
        seen.begin(key)
        seen.end(key)
        return pause if seen.times[key] < 3 else None

    async with working(queue, handle):
        queue.add("a")
        await seen.until("a", 3)
        queue.add("b")
        await seen.until("b", 3)
    assert seen.times == {"a": 3, "b": 3}


async def test_a_hanging_key_delays_no_other_and_is_not_handled_twice() -> None:
    queue, seen, free = Queue(), Seen(), asyncio.Event()

    async def handle(key: str) -> None:
        seen.begin(key)
        if key == "slow":
            await free.wait()
        seen.end(key)

    async with working(queue, handle):
        queue.add("slow")
        for number in range(20):
            queue.add("slow")
            queue.add(f"{number}")
            await seen.until(f"{number}")
        assert "slow" in seen.busy
        free.set()
        await seen.until("slow", 2)
    assert seen.times["slow"] == 2
    assert seen.most == 2


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (TemporaryError("later"), "info"),
        (PermanentError("never"), "info"),
        (KeyError("a mistake"), "error"),
        (TimeoutError(), "error"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else "",
)
async def test_a_failing_key_is_logged_and_delays_no_other(error: Exception, level: str) -> None:
    queue, seen = Queue(), Seen()

    async def handle(key: str) -> None:
        seen.begin(key)
        seen.end(key)
        if key.startswith("bad"):
            raise error

    with capture_logs() as logs:
        async with working(queue, handle, workers=1) as running:
            for number in range(5):
                queue.add(f"bad {number}")
                queue.add(f"good {number}")
            await seen.until("good 4")
            # It comes when the sweep brings it.
            queue.add("bad 0")
            await seen.until("bad 0", 2)
            assert not running.done()
    failures = [entry for entry in logs if entry["event"] == "reconcile.failed"]
    assert {entry["log_level"] for entry in failures} == {level}
    assert [entry["key"] for entry in failures] == [f"bad {n}" for n in range(5)] + ["bad 0"]


async def test_a_key_added_while_it_failed_is_handled_again() -> None:
    queue, seen = Queue(), Seen()

    async def handle(key: str) -> None:
        seen.begin(key)
        if not seen.times:
            queue.add(key)
        seen.end(key)
        raise TemporaryError("later")

    async with working(queue, handle):
        queue.add("a")
        await seen.until("a", 2)


async def test_workers_end_with_their_task_and_leave_no_timer() -> None:
    queue, began = Queue(), asyncio.Event()

    async def handle(key: str) -> None:
        began.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(work(queue, handle, workers=2))
    queue.add("a")
    queue.add("b", after=0.01)
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = len(queue)
    await asyncio.sleep(0.05)
    assert len(queue) == before


@pytest.mark.parametrize("loop", ["work", "sweep"])
async def test_a_cancellation_replaced_by_an_error_ends_the_loop(loop: str) -> None:
    """Cleaning up may fail, for example with an unavailable back-end."""
    begun = asyncio.Event()

    async def handle(key: str = "") -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise DatabaseUnavailable("away")

    queue = Queue()
    queue.add("a")
    running = work(queue, handle, workers=1) if loop == "work" else sweep("failed", 0, handle)
    task = asyncio.ensure_future(running)
    async with asyncio.timeout(60):
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
