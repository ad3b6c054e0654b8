"""Redis becomes unavailable and recovers: no call hangs, and no lost lease counts as held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from atoll.coordination.redis import RedisCoordination, leases
from atoll.errors import CoordinationUnavailable, TemporaryError
from atoll.settings import CoordinationSettings
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.anyio

T = TypeVar("T")

LONG = 60.0
QUICK = pytest.mark.parametrize("patience", [2.0])
"""Time-outs for a silent server; a stopped one has closed its connections."""


@pytest.fixture
def patience() -> float:
    """Seconds for the server to answer."""
    return 5.0


@pytest.fixture(params=["redis"])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[RedisServer]:
    with RedisServer(tmp_path, cluster=request.param == "redis-cluster") as server:
        yield server


on_cluster_too = pytest.mark.parametrize("server", ["redis", "redis-cluster"], indirect=True)
"""Ways in which a cluster client reconnects and gives up."""


class Watched(RedisCoordination):
    """Records the notifications of its observers."""

    def __init__(self, replica: str, url: str, patience: float) -> None:
        settings = CoordinationSettings(
            # No heartbeats are sent here; and waiters, which check again after a third of it, must
            # be woken earlier.
            presence_ttl=timedelta(seconds=600),
            connect_timeout=timedelta(seconds=patience),
            read_timeout=timedelta(seconds=patience),
        )
        super().__init__(replica, url, settings, timedelta(hours=1))
        self.gaps: asyncio.Queue[None] = asyncio.Queue()
        self.cancellations: asyncio.Queue[str] = asyncio.Queue()
        self.subscribe(self)

    def cancellation_requested(self, execution_id: str) -> None:
        self.cancellations.put_nowait(execution_id)

    def coordination_restored(self) -> None:
        self.gaps.put_nowait(None)


@pytest.fixture
async def replicas(server: RedisServer, patience: float) -> AsyncIterator[tuple[Watched, Watched]]:
    async with AsyncExitStack() as stack:
        both = Watched("a", server.url, patience), Watched("b", server.url, patience)
        for replica in both:
            stack.push_async_callback(replica.close)
            await replica.open()
        yield both
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in tasks if "TestRunner" not in repr(task)]


async def bounded(work: asyncio.Task[T]) -> T:
    async with asyncio.timeout(LONG):
        return await work


async def until_in_line(server: RedisServer, key: str, count: int) -> None:
    async with asyncio.timeout(LONG):
        line = f"{{atoll:{key}}}:line"
        while server.execute("ZCARD", line) != f":{count}\r\n":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_available(replica: RedisCoordination) -> None:
    async with asyncio.timeout(LONG):
        while True:
            with suppress(TemporaryError):
                await replica.heartbeat()
                return
            await asyncio.sleep(0.05)


@on_cluster_too
async def test_leases_lost_by_a_restart_are_reported_as_lost(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    server.kill()
    with pytest.raises(TemporaryError) as gone:
        await a.renew("s", "x")
    assert gone.value.code == "coordination_unavailable"

    server.start()
    await until_available(b)
    assert not await a.renew("s", "x")
    assert await a.heartbeat() is False
    assert await b.acquire("s", "y") is None
    await a.release("s", "x")
    assert await b.renew("s", "y")


@on_cluster_too
async def test_no_caller_waits_for_a_stopped_redis(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=10 * LONG))
    await until_in_line(server, "s", 1)
    asked = asyncio.create_task(a.ask("e", {}, timeout=10 * LONG))
    async with b.listen("t") as subscription:
        listener = asyncio.create_task(subscription.wait(10 * LONG))
        await asyncio.sleep(0)
        server.kill()
        for waiting in (waiter, asked):
            with pytest.raises(TemporaryError):
                await bounded(waiting)
        assert await bounded(listener)
        # And while it stays unavailable.
        assert await bounded(asyncio.create_task(subscription.wait(10 * LONG)))
        with pytest.raises(TemporaryError):
            await a.acquire("s", "z", wait=10 * LONG)
        with pytest.raises(TemporaryError):
            await a.ask("f", {}, timeout=10 * LONG)
        with pytest.raises(TemporaryError):
            async with a.listen("u"):
                pass


async def test_the_number_of_uncertain_requests_is_bounded(
    server: RedisServer, replicas: tuple[Watched, Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_UNCERTAIN", 5)
    a, _ = replicas
    server.kill()
    for number in range(20):
        with pytest.raises(TemporaryError):
            await a.acquire(f"s{number}", "owner")
    assert len(a._leases._uncertain) == 5


async def test_callers_waiting_over_a_restart_get_the_lease_or_an_error(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")

    async def take(replica: Watched, owner: str) -> None:
        with suppress(TemporaryError):
            # In any order, because the queue is lost with the server. Until the next heartbeat each
            # replica counts as lost for the other, which may take over the lease.
            assert await replica.acquire("s", owner, wait=10 * LONG) is None
            await replica.release("s", owner)

    waiters = []
    for count in range(6):
        waiters.append(asyncio.create_task(take(replicas[count % 2], f"y{count}")))
        await until_in_line(server, "s", count + 1)
    server.stop()
    server.start()
    await until_available(a)
    await until_available(b)
    for waiter in waiters:
        await bounded(waiter)

    # Leases that are not known to be held were not kept either.
    await a.heartbeat()
    await b.heartbeat()
    assert await a.acquire("s", "z", wait=LONG) is None


async def until_received(replica: Watched, by: Watched) -> str:
    """Notify repeatedly, because a slow listener may lose its connection again."""
    async with asyncio.timeout(LONG):
        while replica.cancellations.empty():
            with suppress(TemporaryError):
                await by.cancel("e", "user")
            await asyncio.sleep(0.05)
    return replica.cancellations.get_nowait()


@pytest.mark.parametrize(("way", "patience"), [("kill", 5.0), ("stop", 5.0), ("pause", 2.0)])
async def test_cancellations_are_received_again_after_an_outage(
    server: RedisServer, replicas: tuple[Watched, Watched], way: str
) -> None:
    a, b = replicas
    async with a.listen("t") as listener:
        if way == "pause":
            server.pause()
        else:
            getattr(server, way)()
        assert await bounded(asyncio.create_task(listener.wait(10 * LONG)))
        if way == "pause":
            server.resume()
        else:
            server.start()
        async with asyncio.timeout(LONG):
            await a.gaps.get()
            await b.gaps.get()
        await until_available(a)
        await until_available(b)
        assert await until_received(a, by=b) == "e"
        assert await until_received(b, by=b) == "e"
        while await listener.wait(0.01):
            pass
        await b.notify("t")
        assert await listener.wait(LONG)

    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=LONG))
    await until_in_line(server, "s", 1)
    await a.release("s", "x")
    assert await bounded(waiter) is None


@QUICK
@on_cluster_too
async def test_a_silent_redis_causes_an_error_in_bounded_time(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=10 * LONG))
    await until_in_line(server, "s", 1)
    asked = asyncio.create_task(b.ask("e", {}, timeout=10 * LONG))
    async with a.listen("t") as listener:
        server.pause()
        try:
            for waiting in (waiter, asked):
                with pytest.raises(TemporaryError):
                    await bounded(waiting)
            assert await bounded(asyncio.create_task(listener.wait(10 * LONG)))
            calls = [
                a.heartbeat(), a.alive("b"), a.acquire("s", "z", wait=LONG), a.renew("s", "x"),
                a.release("s", "x"), a.ask("e", {}, timeout=LONG), a.question("e"),
                a.resolve("e", {}), a.cancel("e", "user"), a.cancelled("e"), a.notify("t"),
            ]  # fmt: skip
            async with asyncio.timeout(LONG):
                errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [CoordinationUnavailable] * len(calls)
            async with asyncio.timeout(LONG):
                await a.shutdown()
                await a.close()
        finally:
            server.resume()


@QUICK
async def test_a_cancelled_call_to_a_silent_redis_ends(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=10 * LONG))
    await until_in_line(server, "s", 1)
    asked = asyncio.create_task(b.ask("e", {}, timeout=10 * LONG))
    server.pause()
    try:
        for waiting in (waiter, asked):
            waiting.cancel()
            with pytest.raises((asyncio.CancelledError, TemporaryError)):
                await bounded(waiting)
    finally:
        server.resume()


async def test_shutdown_and_close_end_without_a_server(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    server.kill()
    async with asyncio.timeout(LONG):
        await a.shutdown()
        await a.close()
    with pytest.raises(TemporaryError):
        await a.alive("b")
    server.start()
    await until_available(b)
    await a.open()
    assert await a.acquire("s", "x") is None


async def test_closing_wakes_all_waiting_calls(replicas: tuple[Watched, Watched]) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=10 * LONG))
    asked = asyncio.create_task(b.ask("e", {}, timeout=10 * LONG))
    async with asyncio.timeout(LONG):
        while await a.question("e") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await b.close()
    for waiting in (waiter, asked):
        with pytest.raises(TemporaryError):
            await bounded(waiting)
