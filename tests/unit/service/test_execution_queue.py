"""One at a time, in order; and how much of an execution somebody has heard."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.executor import frames
from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.service.running import Heard, Queue, Running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

pytestmark = pytest.mark.anyio


async def test_the_first_has_its_turn_at_once_and_the_others_in_order() -> None:
    queue = Queue()
    first, second, third = queue.join(), queue.join(), queue.join()
    assert await first
    assert not second.done()

    queue.leave(first)
    assert await second
    assert not third.done()
    queue.leave(second)
    assert await third
    queue.leave(third)
    assert not queue.busy


async def test_one_that_gave_up_is_passed_over() -> None:
    queue = Queue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.set_result(False)
    queue.leave(first)

    assert await third
    queue.leave(second)
    queue.leave(third)
    assert not queue.busy


async def test_one_that_leaves_before_its_turn_gives_no_turn_away() -> None:
    queue = Queue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.set_result(False)
    queue.leave(second)

    assert not third.done()
    assert list(queue.waiting) == [third]
    queue.leave(first)
    assert await third


async def test_one_that_is_cancelled_is_passed_over() -> None:
    queue = Queue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.cancel()
    queue.leave(second)
    queue.leave(first)

    assert await third


async def test_one_whose_turn_came_as_it_was_cancelled_passes_it_on() -> None:
    queue = Queue()
    first, second, third = queue.join(), queue.join(), queue.join()

    async def wait() -> None:
        try:
            await second
        finally:
            queue.leave(second)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    queue.leave(first)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert await third


async def test_a_queue_that_was_empty_starts_anew() -> None:
    queue = Queue()
    queue.leave(queue.join())

    assert await queue.join()


@given(
    order=st.lists(st.sampled_from(["join", "leave", "give up"]), max_size=40),
    choice=st.randoms(use_true_random=False),
)
def test_never_two_have_their_turn(order: list[str], choice: Random) -> None:
    asyncio.run(_live_through(order, choice))


async def _live_through(order: list[str], choice: Random) -> None:
    queue = Queue()
    there: list[asyncio.Future[bool]] = []

    def running() -> list[asyncio.Future[bool]]:
        return [turn for turn in there if turn.done() and turn.result()]

    for step in order:
        if step == "join":
            there.append(queue.join())
        elif there and step == "leave":
            # Only one whose turn came, or who gave up, leaves.
            turn = choice.choice([turn for turn in there if turn.done()])
            there.remove(turn)
            queue.leave(turn)
        elif waiting := [turn for turn in there if not turn.done()]:
            choice.choice(waiting).set_result(False)
        assert len(running()) <= 1
        wanting = [turn for turn in there if not turn.done() or turn.result()]
        assert not wanting or len(running()) == 1


# How much was heard

EVENTS = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(min_size=1, max_size=5)), max_size=12
)


def whole(events: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    return {
        name: b"".join(data for kind, data in events if kind == name)
        for name in ("stdout", "stderr")
    }


@given(events=EVENTS, stop=st.integers(min_value=0))
def test_one_who_comes_back_hears_exactly_the_rest(
    events: list[tuple[str, bytes]], stop: int
) -> None:
    live = [("started", b""), *events]
    first = Heard()
    told = [found for event in live if (found := first.hear(*event)) is not None]
    numbers = [number for number, _, _ in told] + [first.end()]
    assert numbers == sorted(set(numbers))
    assert [(name, data) for _, name, data in told] == live

    kept = told[: stop % (len(told) + 1)]
    after = kept[-1][0] if kept else 0
    heard = [(name, data) for _, name, data in kept]
    record = [("started", b""), *whole(events).items()]
    for source in (live, record):
        again = Heard(after)
        rest = [found for event in source if (found := again.hear(*event)) is not None]
        both = heard + [(name, data) for _, name, data in rest]
        assert whole(both) == whole(events)
        assert [name for name, _ in both].count("started") == 1
        assert all(number > after for number, _, _ in rest)
        assert again.end() == first.end() > after


def test_one_who_heard_the_end_hears_nothing_again() -> None:
    first = Heard()
    for event in (("started", b""), ("stdout", b"abc"), ("stderr", b"de")):
        first.hear(*event)
    again = Heard(first.end())

    assert again.hear("started", b"") is None
    assert again.hear("stdout", b"abc") is None
    assert again.hear("stderr", b"de") is None


@given(number=st.integers(min_value=0, max_value=2**90))
def test_any_number_is_a_place_to_start_from(number: int) -> None:
    heard = Heard(number)
    heard.hear("started", b"")
    heard.hear("stdout", b"x" * 10)

    assert heard.end() > 0


def running() -> Running:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    request = Request(code="")
    return Running(Execution("exec_1", "sess_1", request, ExecutionStatus.RUNNING, now))


async def test_output_that_nobody_follows_is_kept_in_few_pieces() -> None:
    heard = running()
    for sequence in range(10_000):
        heard.output(sequence + 1, frames.STDOUT, b"x")

    assert heard.gathered("stdout") == b"x" * 10_000
    assert len(heard.events) == 1


async def test_output_that_somebody_follows_is_not_changed_behind_their_back() -> None:
    heard = running()
    heard.output(1, frames.STDOUT, b"a")
    heard.listeners = 1
    heard.output(2, frames.STDOUT, b"b")

    assert [(name, bytes(data)) for name, data in heard.events] == [
        ("stdout", b"a"),
        ("stdout", b"b"),
    ]
