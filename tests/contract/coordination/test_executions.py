"""Window, cancellation, messages, topics, and the end of executions and replicas."""

from __future__ import annotations

import asyncio

import pytest

from atoll.coordination.base import MAX_MESSAGE_SIZE, MAX_MESSAGES, Coordination, LeaseHolder
from atoll.errors import TemporaryError, TooLarge

from .ground import LONG, Ground, until

pytestmark = pytest.mark.anyio


async def test_a_window_is_open_until_its_execution_closes_it(ground: Ground) -> None:
    assert await ground.a.window("s") is None
    await ground.a.open_window("s", "e")
    await ground.a.open_window("s", "e")
    assert await ground.b.window("s") == "e"
    await ground.b.open_window("s", "f")
    await ground.a.close_window("s", "e")
    assert await ground.a.window("s") == "f"
    await ground.b.close_window("s", "f")
    await ground.b.close_window("s", "f")
    assert await ground.a.window("s") is None


async def test_a_window_expires(ground: Ground) -> None:
    await ground.a.open_window("s", "e")
    await ground.leases_expire()
    assert await ground.a.window("s") is None


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


async def test_messages_are_given_out_in_order_and_once(ground: Ground) -> None:
    messages = [f"message {number} ø \ud800" for number in range(10)]
    for number, message in enumerate(messages):
        await (ground.a, ground.b)[number % 2].push("e", message)
    assert await ground.b.drain("f") == []
    assert await ground.b.drain("e") == messages
    assert await ground.a.drain("e") == []
    await ground.a.push("e", "")
    assert await ground.a.drain("e") == [""]


async def test_concurrent_drains_return_each_message_once(ground: Ground) -> None:
    given: list[str] = []

    async def drain(replica: Coordination) -> None:
        async with asyncio.timeout(LONG):
            while len(given) < 100:
                given.extend(await replica.drain("e"))
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for replica in (ground.a, ground.b, ground.a):
            group.create_task(drain(replica))
        for number in range(100):
            await ground.a.push("e", str(number))
    assert sorted(given) == sorted(str(number) for number in range(100))


async def test_messages_beyond_the_bound_are_refused(ground: Ground) -> None:
    for start in range(0, MAX_MESSAGES, 100):
        await asyncio.gather(
            *(ground.a.push("e", str(number)) for number in range(start, start + 100))
        )
    with pytest.raises(TemporaryError) as refused:
        await ground.b.push("e", "one more")
    assert refused.value.code == "queue_full"
    assert len(await ground.a.drain("e")) == MAX_MESSAGES
    await ground.b.push("e", "x" * MAX_MESSAGE_SIZE)
    with pytest.raises(TooLarge):
        await ground.b.push("e", "x" * (MAX_MESSAGE_SIZE - 1) + "ø")


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


async def test_a_cleaned_execution_is_forgotten(ground: Ground) -> None:
    await ground.a.acquire("s", "e")
    waiter = asyncio.create_task(ground.b.acquire("s", "f", wait=LONG))
    await ground.until_in_line("s", 1)
    await ground.a.open_window("s", "e")
    await ground.a.push("e", "hello")
    asked = asyncio.create_task(ground.a.ask("e", {}, timeout=LONG))

    async def is_asked() -> bool:
        return await ground.a.question("e") is not None

    await until(is_asked)
    await ground.b.clean("s", "e")
    await ground.b.clean("s", "e")
    assert await asked is None
    assert await waiter is None
    assert await ground.a.window("s") is None
    assert await ground.a.drain("e") == []
    await ground.a.cancel("e", "user")
    await ground.a.clean("s", "e")
    assert await ground.b.cancelled("e") is None


async def test_cleaning_keeps_the_state_of_other_executions(ground: Ground) -> None:
    await ground.a.acquire("s", "f")
    await ground.a.open_window("s", "f")
    await ground.a.clean("s", "e")
    assert await ground.a.holder("s") == LeaseHolder("a", "f")
    assert await ground.a.window("s") == "f"


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
    assert await ground.b.holder("t") == LeaseHolder("b", "y")
    with pytest.raises(TemporaryError):
        await ground.a.acquire("u", "x")
    assert not await ground.a.heartbeat()


async def test_nothing_is_left_after_all_was_given_back(ground: Ground) -> None:
    await ground.a.acquire("s", "e")
    await ground.a.open_window("s", "e")
    await ground.b.acquire("s", "f", wait=0.05)
    await ground.a.push("e", "hello")
    await ground.a.cancel("e", "user")
    await ground.a.ask("e", {}, timeout=LONG)
    async with ground.a.listen("t"):
        await ground.a.notify("t")
    assert not await ground.nothing_left()
    await ground.a.clean("s", "e")
    await ground.a.shutdown()
    await ground.b.shutdown()
    assert await ground.nothing_left()


async def test_opening_and_closing_twice_is_harmless(ground: Ground) -> None:
    await ground.a.open()
    await ground.a.acquire("s", "x")
    await ground.a.close()
    await ground.a.close()
    assert await ground.b.holder("s") == LeaseHolder("a", "x")
    await ground.a.open()
    assert await ground.a.renew("s", "x")
