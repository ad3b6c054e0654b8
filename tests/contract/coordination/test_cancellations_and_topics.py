"""Cancellation, topics, and the end of replicas."""

from __future__ import annotations

import asyncio

import pytest

from atoll.coordination.base import Coordination, LeaseHolder
from atoll.errors import TemporaryError

from .ground import LONG, Ground

pytestmark = pytest.mark.anyio


class Recorder:
    """Records the cancellations that a replica reports."""

    def __init__(self, replica: str, requests: asyncio.Queue[tuple[str, str]]) -> None:
        self._replica = replica
        self._requests = requests

    def cancellation_requested(self, execution_id: str) -> None:
        self._requests.put_nowait((self._replica, execution_id))

    def coordination_restored(self) -> None:
        pass


def cancellations_of(*replicas: Coordination) -> asyncio.Queue[tuple[str, str]]:
    requests: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    for replica in replicas:
        replica.subscribe(Recorder(replica.replica, requests))
    return requests


async def test_every_replica_is_notified_of_a_cancellation_and_the_first_reason_stays(
    ground: Ground,
) -> None:
    cancellations = cancellations_of(ground.a, ground.b)
    assert await ground.a.cancelled("e") is None
    await ground.a.cancel("e", "user")
    async with asyncio.timeout(LONG):
        assert {await cancellations.get(), await cancellations.get()} == {("a", "e"), ("b", "e")}
    await ground.b.cancel("e", "timeout")
    assert await ground.a.cancelled("e") == await ground.b.cancelled("e") == "user"
    assert await ground.a.cancelled("f") is None


async def test_notifications_arrive_while_listening(ground: Ground) -> None:
    async with ground.a.listen("t") as here, ground.b.listen("t") as there:
        assert not await here.wait(0.01)
        await ground.b.notify("t")
        await ground.b.notify("t")
        assert await here.wait(LONG)
        assert await there.wait(LONG)
        async with ground.a.listen("u") as other:
            await ground.a.notify("u")
            assert await other.wait(LONG)
            await ground.a.notify("another")
            assert not await other.wait(0.01)
        waiting = asyncio.create_task(there.wait(LONG))
        await ground.a.notify("t")
        assert await waiting
    await ground.a.notify("t")


async def test_one_of_two_listeners_may_leave(ground: Ground) -> None:
    async with ground.a.listen("t") as stays:
        for _ in range(5):
            async with ground.a.listen("t"):
                pass
            await ground.b.notify("t")
            assert await stays.wait(LONG)


async def test_shutdown_releases_all_leases_and_leaves_all_queues(ground: Ground) -> None:
    for number in range(20):
        await ground.a.acquire(f"s{number}", "x")
    await ground.b.acquire("t", "y")
    waiter = asyncio.create_task(ground.a.acquire("t", "x", wait=LONG))
    await ground.until_in_line("t", 1)
    next_ = asyncio.create_task(ground.b.acquire("s0", "y", wait=LONG))
    await ground.until_in_line("s0", 1)

    await ground.a.shutdown()
    await ground.a.shutdown()
    assert not await ground.b.alive("a")
    assert await next_ is None
    for number in range(1, 20):
        assert await ground.b.acquire(f"s{number}", "y") is None
    with pytest.raises(TemporaryError):
        await waiter
    assert await ground.in_line("t") == 0
    assert await ground.holder("t") == LeaseHolder("b", "y")
    with pytest.raises(TemporaryError):
        await ground.a.acquire("u", "x")
    assert not await ground.a.heartbeat()


async def test_nothing_is_left_after_all_was_given_back(ground: Ground) -> None:
    await ground.a.acquire("s", "e")
    await ground.b.acquire("s", "f", wait=0.05)
    assert await ground.a.ask("e", {}, timeout=0.05) is None
    async with ground.a.listen("t"):
        await ground.a.notify("t")
    assert not await ground.nothing_left()
    await ground.a.shutdown()
    await ground.b.shutdown()
    assert await ground.nothing_left()


async def test_opening_and_closing_twice_is_harmless(ground: Ground) -> None:
    await ground.a.open()
    await ground.a.acquire("s", "x")
    await ground.a.close()
    await ground.a.close()
    assert await ground.holder("s") == LeaseHolder("a", "x")
    await ground.a.open()
    assert await ground.a.renew("s", "x")
