"""As many at a time as there are places, in order."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.service.executions.run import SlotQueue

if TYPE_CHECKING:
    from random import Random

pytestmark = pytest.mark.anyio


async def test_the_first_has_its_turn_at_once_and_the_others_in_order() -> None:
    queue = SlotQueue()
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
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.set_result(False)
    queue.leave(first)

    assert await third
    queue.leave(second)
    queue.leave(third)
    assert not queue.busy


async def test_one_that_leaves_before_its_turn_gives_no_turn_away() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.set_result(False)
    queue.leave(second)

    assert not third.done()
    assert list(queue.waiting) == [third]
    queue.leave(first)
    assert await third


async def test_one_that_is_cancelled_is_passed_over() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.cancel()
    queue.leave(second)
    queue.leave(first)

    assert await third


async def test_one_whose_turn_came_as_it_was_cancelled_passes_it_on() -> None:
    queue = SlotQueue()
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
    queue = SlotQueue()
    queue.leave(queue.join())

    assert await queue.join()


@given(
    order=st.lists(st.sampled_from(["join", "leave", "give up"]), max_size=40),
    choice=st.randoms(use_true_random=False),
)
def test_never_two_have_their_turn(order: list[str], choice: Random) -> None:
    asyncio.run(_live_through(order, choice))


async def _live_through(order: list[str], choice: Random) -> None:
    queue = SlotQueue()
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


@given(
    capacity=st.integers(1, 4),
    order=st.lists(st.sampled_from(["join", "leave", "give up"]), max_size=40),
    choice=st.randoms(use_true_random=False),
)
def test_no_place_is_given_twice(capacity: int, order: list[str], choice: Random) -> None:
    asyncio.run(_fill(capacity, order, choice))


async def _fill(capacity: int, order: list[str], choice: Random) -> None:
    queue = SlotQueue(capacity)
    there: list[asyncio.Future[bool]] = []
    for step in order:
        if step == "join":
            there.append(queue.join())
        elif there and step == "leave":
            turn = choice.choice(there)
            there.remove(turn)
            queue.leave(turn)
        elif waiting := [turn for turn in there if not turn.done()]:
            choice.choice(waiting).set_result(False)
        running = [turn for turn in there if turn.done() and turn.result()]
        assert sorted({queue.slot(turn) for turn in running}) == sorted(map(queue.slot, running))
        assert all(queue.slot(turn) < capacity for turn in running)
        wanting = [turn for turn in there if not turn.done() or turn.result()]
        assert len(running) == min(capacity, len(wanting))
        # Who came first is before who came later.
        places = [queue.ahead(turn) for turn in there if not turn.done()]
        assert places == sorted(places)


async def test_those_who_wait_are_told_when_the_line_moves() -> None:
    queue = SlotQueue()
    told: list[int] = []
    first = queue.join()
    turns = [queue.join(partial(told.append, number)) for number in range(3)]
    assert [queue.ahead(turn) for turn in turns] == [1, 2, 3]
    queue.leave(first)
    assert told == [1, 2]
    assert [queue.ahead(turn) for turn in turns[1:]] == [1, 2]
