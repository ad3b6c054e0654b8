"""Cancellation, topics, and the end of replicas."""

from __future__ import annotations

import asyncio

import pytest

from atoll.coordination.base import Coordination, LeaseHolder
from atoll.errors import TemporaryError

from .backend import LONG, Backend

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


async def test_every_replica_is_notified_of_a_cancellation_with_the_first_reason(
    backend: Backend,
) -> None:
    cancellations = cancellations_of(backend.a, backend.b)
    assert await backend.a.cancelled("e") is None
    await backend.a.cancel("e", "user")
    async with asyncio.timeout(LONG):
        assert {await cancellations.get(), await cancellations.get()} == {("a", "e"), ("b", "e")}
    await backend.b.cancel("e", "timeout")
    assert await backend.a.cancelled("e") == await backend.b.cancelled("e") == "user"
    assert await backend.a.cancelled("f") is None


async def test_notifications_arrive_while_listening(backend: Backend) -> None:
    async with backend.a.listen("t") as here, backend.b.listen("t") as there:
        assert not await here.wait(0.01)
        await backend.b.notify("t")
        await backend.b.notify("t")
        assert await here.wait(LONG)
        assert await there.wait(LONG)
        async with backend.a.listen("u") as other:
            await backend.a.notify("u")
            assert await other.wait(LONG)
            await backend.a.notify("another")
            assert not await other.wait(0.01)
        waiting = asyncio.create_task(there.wait(LONG))
        await backend.a.notify("t")
        assert await waiting
    await backend.a.notify("t")


@pytest.mark.parametrize("owner", ["x", "y"], ids=["held", "not_held"])
async def test_releasing_a_lease_can_notify_a_topic(backend: Backend, owner: str) -> None:
    assert await backend.a.acquire("s", "x") is None
    async with backend.b.listen("t") as there:
        await backend.a.release("s", owner, topic="t")
        assert await there.wait(LONG)

    assert (await backend.b.acquire("s", "z") is None) == (owner == "x")


async def test_a_listener_can_leave_while_another_stays(backend: Backend) -> None:
    async with backend.a.listen("t") as stays:
        for _ in range(5):
            async with backend.a.listen("t"):
                pass
            await backend.b.notify("t")
            assert await stays.wait(LONG)


async def test_shutdown_releases_all_leases_and_leaves_all_queues(backend: Backend) -> None:
    for number in range(20):
        await backend.a.acquire(f"s{number}", "x")
    await backend.b.acquire("t", "y")
    waiter = asyncio.create_task(backend.a.acquire("t", "x", wait=LONG))
    await backend.until_in_line("t", 1)
    next_ = asyncio.create_task(backend.b.acquire("s0", "y", wait=LONG))
    await backend.until_in_line("s0", 1)

    await backend.a.shutdown()
    await backend.a.shutdown()
    assert not await backend.b.alive("a")
    assert await next_ is None
    for number in range(1, 20):
        assert await backend.b.acquire(f"s{number}", "y") is None
    with pytest.raises(TemporaryError):
        await waiter
    assert await backend.in_line("t") == 0
    assert await backend.holder("t") == LeaseHolder("b", "y")
    with pytest.raises(TemporaryError):
        await backend.a.acquire("u", "x")
    assert not await backend.a.heartbeat()


async def test_no_keys_remain_after_everything_was_released(backend: Backend) -> None:
    await backend.a.acquire("s", "e")
    await backend.b.acquire("s", "f", wait=0.05)
    assert await backend.a.ask("e", {}, timeout=0.05) is None
    async with backend.a.listen("t"):
        await backend.a.notify("t")
    assert not await backend.is_empty()
    await backend.a.shutdown()
    await backend.b.shutdown()
    assert await backend.is_empty()


async def test_opening_and_closing_twice_is_harmless(backend: Backend) -> None:
    await backend.a.open()
    await backend.a.acquire("s", "x")
    await backend.a.close()
    await backend.a.close()
    assert await backend.holder("s") == LeaseHolder("a", "x")
    await backend.a.open()
    assert await backend.a.renew("s", "x")
