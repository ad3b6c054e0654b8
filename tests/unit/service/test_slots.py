"""A session runs at most as many executions concurrently as it has slots, in order."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.service.executions.slots import Slot, SlotQueue

if TYPE_CHECKING:
    from random import Random

pytestmark = pytest.mark.anyio


async def test_the_first_execution_gets_its_slot_at_once_and_the_others_in_order() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    await first.wait()
    assert second.waiting

    first.leave()
    await second.wait()
    assert third.waiting
    second.leave()
    await third.wait()
    assert third.granted
    third.leave()
    assert not queue.used


async def test_an_execution_that_gave_up_is_skipped() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.give_up()
    first.leave()

    assert third.granted
    assert not second.granted
    second.leave()
    third.leave()
    assert not queue.used


async def test_an_execution_that_leaves_before_its_slot_is_granted_grants_none() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    second.give_up()
    second.leave()

    assert third.waiting
    assert queue.waiting == 1
    first.leave()
    assert third.granted


async def test_a_cancelled_execution_is_skipped() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()
    task = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    first.leave()
    second.leave()

    assert third.granted


async def test_an_execution_cancelled_as_its_slot_is_granted_passes_it_on() -> None:
    queue = SlotQueue()
    first, second, third = queue.join(), queue.join(), queue.join()

    async def wait() -> None:
        try:
            await second.wait()
        finally:
            second.leave()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    first.leave()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert third.granted


async def test_an_emptied_queue_grants_a_slot_again() -> None:
    queue = SlotQueue()
    queue.join().leave()

    assert queue.join().granted


@given(
    capacity=st.integers(1, 4),
    order=st.lists(st.sampled_from(["join", "leave", "give up"]), max_size=40),
    choice=st.randoms(use_true_random=False),
)
def test_no_slot_is_granted_twice(capacity: int, order: list[str], choice: Random) -> None:
    asyncio.run(_fill(capacity, order, choice))


async def _fill(capacity: int, order: list[str], choice: Random) -> None:
    queue = SlotQueue(capacity)
    there: list[Slot] = []
    for step in order:
        if step == "join":
            there.append(queue.join())
        elif there and step == "leave":
            slot = choice.choice(there)
            there.remove(slot)
            slot.leave()
        elif waiting := [slot for slot in there if slot.waiting]:
            choice.choice(waiting).give_up()
        numbers = sorted(slot.number for slot in there if slot.granted)
        assert numbers == sorted(set(numbers))
        assert all(number < capacity for number in numbers)
        wanting = [slot for slot in there if slot.waiting or slot.granted]
        assert len(numbers) == min(capacity, len(wanting))
        # An earlier execution is before a later one.
        positions = [slot.position for slot in there if slot.waiting]
        assert positions == sorted(positions)


async def test_waiting_executions_are_notified_when_the_queue_moves() -> None:
    queue = SlotQueue()
    moved: list[int] = []
    first = queue.join()
    slots = [queue.join(partial(moved.append, number)) for number in range(3)]
    assert [slot.position for slot in slots] == [1, 2, 3]
    first.leave()
    assert moved == [1, 2]
    assert [slot.position for slot in slots[1:]] == [1, 2]
