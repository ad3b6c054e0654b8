"""Keys are handed out once, to one worker at a time, and none is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.reconcile.queue import Queue

pytestmark = pytest.mark.anyio

SHORT = 0.02
LONG = 600.0
KEYS = st.sampled_from(["a", "b", "c"])


async def take_now(queue: Queue) -> str | None:
    """The key that can be taken immediately, if any."""
    taking = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    if taking.done():
        return taking.result()
    taking.cancel()
    return None


async def test_a_key_added_repeatedly_is_handed_out_once() -> None:
    queue = Queue()
    for _ in range(5):
        queue.add("a")

    assert len(queue) == 1
    assert [await take_now(queue), await take_now(queue)] == ["a", None]


async def test_a_taken_key_waits_until_it_is_done() -> None:
    queue = Queue()
    queue.add("a")
    assert await queue.take() == "a"
    queue.add("a")
    queue.add("a")

    assert await take_now(queue) is None
    queue.done("a")
    assert [await take_now(queue), await take_now(queue)] == ["a", None]
    queue.done("a")
    assert await take_now(queue) is None
    assert len(queue) == 0


async def test_a_finished_key_can_be_added_again() -> None:
    queue = Queue()
    queue.add("a")
    await queue.take()
    queue.done("a")
    queue.add("a")

    assert await take_now(queue) == "a"


async def test_a_waiting_worker_gets_a_new_key_and_each_key_has_one_worker() -> None:
    queue = Queue()
    waiting = [asyncio.ensure_future(queue.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in ("a", "b", "a", "c"):
        queue.add(key)

    assert sorted(await asyncio.gather(*waiting)) == ["a", "b", "c"]


async def test_a_cancelled_worker_takes_no_key() -> None:
    queue = Queue()
    leaving = asyncio.ensure_future(queue.take())
    staying = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    leaving.cancel()

    async with asyncio.timeout(60):
        assert await staying == "a"


async def test_a_key_added_for_later_is_taken_later() -> None:
    queue = Queue()
    queue.add("a", after=SHORT)

    assert await take_now(queue) is None
    async with asyncio.timeout(60):
        assert await queue.take() == "a"


@pytest.mark.parametrize(
    "delays", [(SHORT, LONG), (LONG, SHORT), (LONG, 0.0), (LONG, LONG, SHORT)], ids=str
)
async def test_the_earliest_of_several_times_applies(delays: tuple[float, ...]) -> None:
    queue = Queue()
    for delay in delays:
        queue.add("a", after=delay)

    async with asyncio.timeout(60):
        assert await queue.take() == "a"
    queue.done("a")
    # Once for all of them.
    assert await take_now(queue) is None
    queue.close()


async def test_a_key_whose_time_comes_while_it_is_taken_is_queued_again() -> None:
    queue = Queue()
    queue.add("a")
    await queue.take()
    queue.add("a", after=SHORT)
    await asyncio.sleep(SHORT * 3)

    assert await take_now(queue) is None
    queue.done("a")
    assert await take_now(queue) == "a"


async def test_a_closed_queue_has_no_timers_left() -> None:
    queue = Queue()
    queue.add("a", after=SHORT)
    queue.close()
    await asyncio.sleep(SHORT * 3)

    assert len(queue) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, st.sampled_from([0.0, 0.001, 0.003])), max_size=20))
def test_every_added_key_is_taken_by_one_worker_at_a_time(
    added: list[tuple[str, float]],
) -> None:
    async def go() -> None:
        queue, busy = Queue(), set[str]()
        missing = {key for key, _ in added}
        all_seen = asyncio.Event()

        async def worker() -> None:
            while True:
                key = await queue.take()
                assert key not in busy
                busy.add(key)
                await asyncio.sleep(0.001)
                busy.remove(key)
                queue.done(key)
                missing.discard(key)
                if not missing:
                    all_seen.set()

        workers = [asyncio.ensure_future(worker()) for _ in range(3)]
        for key, delay in added:
            queue.add(key, after=delay)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            if missing:
                await all_seen.wait()
        for task in workers:
            task.cancel()
        ends = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        queue.close()

    asyncio.run(go())


class Model(RuleBasedStateMachine):
    """The queue beside what it promises, in any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.queue = Queue()
        self.due: set[str] = set()
        """Keys that still have to be handled."""
        self.out: set[str] = set()

    def teardown(self) -> None:
        self.loop.close()

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.due.add(key)

    @rule()
    def take(self) -> None:
        key = self.loop.run_until_complete(take_now(self.queue))
        free = self.due - self.out
        if key is None:
            assert not free
            return
        assert key in free
        self.due.remove(key)
        self.out.add(key)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.out)))
        self.queue.done(key)
        self.out.remove(key)

    @invariant()
    def no_key_is_lost(self) -> None:
        assert len(self.queue) == len(self.due)


TestModel = Model.TestCase
