"""Leases: their holders, their queues, and lost or leaving replicas."""

from __future__ import annotations

import asyncio

import pytest

from atoll.coordination.base import LeaseHolder

from .backend import LONG, SHORT_PRESENCE, Backend

pytestmark = pytest.mark.anyio

short_presence = pytest.mark.parametrize("presence", [SHORT_PRESENCE], ids=["short"])


async def test_a_free_lease_is_acquired_and_others_get_its_holder(backend: Backend) -> None:
    assert await backend.holder("s") is None
    assert await backend.a.acquire("s", "x") is None

    holder = LeaseHolder("a", "x")
    assert await backend.holder("s") == holder
    assert await backend.b.acquire("s", "y") == holder
    assert await backend.a.acquire("s", "y") == holder
    assert await backend.b.acquire("another", "y") is None


async def test_owners_of_the_same_name_on_two_replicas_are_distinct(backend: Backend) -> None:
    assert await backend.a.acquire("s", "x") is None
    assert await backend.b.acquire("s", "x") == LeaseHolder("a", "x")
    await backend.b.release("s", "x")
    assert not await backend.b.renew("s", "x")
    assert await backend.holder("s") == LeaseHolder("a", "x")


async def test_an_owner_can_acquire_its_lease_again(backend: Backend) -> None:
    assert await backend.a.acquire("s", "x") is None
    assert await backend.a.acquire("s", "x") is None
    assert await backend.a.acquire("s", "x", wait=LONG) is None
    assert await backend.a.renew("s", "x")
    await backend.a.release("s", "x")
    assert await backend.holder("s") is None


async def test_only_the_owner_can_release_a_lease(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    await backend.a.release("s", "y")
    await backend.b.release("s", "y")
    assert await backend.holder("s") == LeaseHolder("a", "x")
    await backend.a.release("s", "x")
    await backend.a.release("s", "x")
    assert await backend.b.acquire("s", "y") is None


@pytest.mark.quick
async def test_an_expired_lease_is_free_and_cannot_be_renewed(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    await backend.leases_expire()
    assert await backend.holder("s") is None
    assert not await backend.a.renew("s", "x")
    assert await backend.b.acquire("s", "y") is None


async def test_a_late_release_does_not_release_the_lease_of_the_next_holder(
    backend: Backend,
) -> None:
    await backend.a.acquire("s", "x")
    await backend.leases_expire()
    await backend.b.acquire("s", "y")
    await backend.a.release("s", "x")
    assert not await backend.a.renew("s", "x")
    assert await backend.holder("s") == LeaseHolder("b", "y")


@pytest.mark.quick
async def test_a_waiter_gets_a_lease_when_it_is_released(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(backend.b.acquire("s", "y", wait=LONG))
        await backend.until_in_line("s", 1)
        await backend.a.release("s", "x")
        assert await waiter is None
    assert await backend.holder("s") == LeaseHolder("b", "y")
    assert await backend.in_line("s") == 0


async def test_a_waiter_that_times_out_gets_the_holder_and_leaves_the_queue(
    backend: Backend,
) -> None:
    await backend.a.acquire("s", "x")
    assert await backend.b.acquire("s", "y", wait=0.05) == LeaseHolder("a", "x")
    assert await backend.a.acquire("s", "y", wait=0.05) == LeaseHolder("a", "x")
    assert await backend.in_line("s") == 0
    await backend.a.release("s", "x")
    assert await backend.a.acquire("s", "z") is None


async def test_waiters_get_a_lease_in_the_order_of_their_requests(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    replicas = [backend.b, backend.a, backend.a, backend.b, backend.a, backend.b]
    got: list[str] = []

    async def take(place: int) -> None:
        owner = f"y{place}"
        assert await replicas[place].acquire("s", owner, wait=LONG) is None
        got.append(owner)
        await replicas[place].release("s", owner)

    async with asyncio.TaskGroup() as group:
        for place in range(len(replicas)):
            group.create_task(take(place))
            await backend.until_in_line("s", place + 1)
        await backend.a.release("s", "x")
    assert got == [f"y{place}" for place in range(len(replicas))]
    assert await backend.in_line("s") == 0


async def test_a_free_lease_with_waiters_belongs_to_the_first_waiter(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    waiter = asyncio.create_task(backend.b.acquire("s", "y", wait=LONG))
    await backend.until_in_line("s", 1)
    release = asyncio.create_task(backend.a.release("s", "x"))
    holder = await backend.a.acquire("s", "z")
    await release
    assert holder in (LeaseHolder("a", "x"), LeaseHolder("b", "y"))
    assert await waiter is None


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
async def test_a_cancelled_waiter_leaves_the_queue(backend: Backend, which: int) -> None:
    await backend.a.acquire("s", "x")
    waiters = []
    for count, replica in enumerate([backend.b, backend.a]):
        waiters.append(asyncio.create_task(replica.acquire("s", f"y{count}", wait=LONG)))
        await backend.until_in_line("s", count + 1)
    waiters[which].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiters[which]
    assert await backend.in_line("s") == 1

    await backend.a.release("s", "x")
    assert await waiters[1 - which] is None


async def test_a_waiter_cancelled_as_its_turn_comes_leaves_no_lease(backend: Backend) -> None:
    for round_ in range(20):
        await backend.a.acquire("s", "x")
        waiter = asyncio.create_task(backend.b.acquire("s", "y", wait=LONG))
        await backend.until_in_line("s", 1)
        await backend.a.release("s", "x")
        for _ in range(round_):
            await asyncio.sleep(0)
        waiter.cancel()
        try:
            assert await waiter is None
            await backend.b.release("s", "y")
        except asyncio.CancelledError:
            pass
        assert await backend.holder("s") is None
        assert await backend.in_line("s") == 0


async def test_a_call_cancelled_while_it_acquires_a_free_lease_leaves_none(
    backend: Backend,
) -> None:
    for round_ in range(20):
        taker = asyncio.create_task(backend.a.acquire("s", "x"))
        for _ in range(round_):
            await asyncio.sleep(0)
        taker.cancel()
        try:
            assert await taker is None
            await backend.a.release("s", "x")
        except asyncio.CancelledError:
            pass
        assert await backend.holder("s") is None


async def test_a_holder_cancelled_while_it_acquires_its_lease_again_keeps_it(
    backend: Backend,
) -> None:
    await backend.a.acquire("s", "x")
    for round_ in range(20):
        taker = asyncio.create_task(backend.a.acquire("s", "x"))
        for _ in range(round_):
            await asyncio.sleep(0)
        taker.cancel()
        await asyncio.wait({taker})
        assert await backend.a.renew("s", "x")


async def test_the_lease_of_a_lost_replica_is_taken_over(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    await backend.die(backend.a)
    assert not await backend.b.alive("a")
    assert await backend.holder("s") == LeaseHolder("a", "x")
    assert await backend.b.acquire("s", "y") is None
    assert await backend.holder("s") == LeaseHolder("b", "y")


@short_presence
async def test_a_waiter_takes_over_the_lease_of_a_lost_replica(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    waiters = []
    for count in range(2):
        waiters.append(asyncio.create_task(backend.b.acquire("s", f"y{count}", wait=LONG)))
        await backend.until_in_line("s", count + 1)
    await backend.die(backend.a)
    assert await waiters[0] is None
    assert not waiters[1].done()
    await backend.b.release("s", "y0")
    assert await waiters[1] is None


async def test_a_call_without_wait_leaves_a_lost_lease_to_the_first_waiter(
    backend: Backend,
) -> None:
    await backend.a.acquire("s", "x")
    waiter = asyncio.create_task(backend.b.acquire("s", "y", wait=LONG))
    await backend.until_in_line("s", 1)
    await backend.die(backend.a)
    assert await backend.b.acquire("s", "z") == LeaseHolder("b", "y")
    assert await waiter is None


@short_presence
async def test_a_lost_waiter_is_skipped(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    lost = asyncio.create_task(backend.b.acquire("s", "y", wait=LONG))
    await backend.until_in_line("s", 1)
    waiter = asyncio.create_task(backend.a.acquire("s", "z", wait=LONG))
    await backend.until_in_line("s", 2)
    await backend.die(backend.b)
    await backend.a.release("s", "x")
    assert await waiter is None
    lost.cancel()
    await asyncio.wait({lost})


async def test_a_lost_replica_is_informed_by_its_next_heartbeat(backend: Backend) -> None:
    assert await backend.a.heartbeat()
    await backend.lose(backend.a)
    assert not await backend.b.alive("a")
    assert not await backend.a.heartbeat()
    assert await backend.b.alive("a")
    assert await backend.a.heartbeat()


async def test_a_replica_does_not_treat_its_own_leases_as_lost(backend: Backend) -> None:
    await backend.a.acquire("s", "x")
    await backend.lose(backend.a)
    assert await backend.a.acquire("s", "y") == LeaseHolder("a", "x")


async def test_a_lease_has_one_holder_at_a_time_among_many_callers(backend: Backend) -> None:
    holding = 0

    async def take(owner: str, replica_of: int) -> None:
        nonlocal holding
        replica = (backend.a, backend.b)[replica_of]
        assert await replica.acquire("s", owner, wait=LONG) is None
        holding += 1
        assert holding == 1
        await asyncio.sleep(0)
        holding -= 1
        await replica.release("s", owner)

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(take(f"y{number}", number % 2))
    assert await backend.holder("s") is None
    assert await backend.in_line("s") == 0
