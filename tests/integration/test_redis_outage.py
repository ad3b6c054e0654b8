"""Redis goes away and comes back: nobody hangs, nobody believes to hold what is lost."""

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
"""Where the server is silent; one that is gone has closed its connections."""


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
"""Where the client of a cluster has a way of its own: to connect again, and to give up."""


class Watched(RedisCoordination):
    """Records what it tells its observers."""

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


async def until_back(replica: RedisCoordination) -> None:
    async with asyncio.timeout(LONG):
        while True:
            with suppress(TemporaryError):
                await replica.heartbeat()
                return
            await asyncio.sleep(0.05)


@on_cluster_too
async def test_what_a_restart_lost_is_known_to_be_lost(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    server.kill()
    with pytest.raises(TemporaryError) as gone:
        await a.renew("s", "x")
    assert gone.value.code == "coordination_unavailable"

    server.start()
    await until_back(b)
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
    async with b.listen("t") as heard:
        listener = asyncio.create_task(heard.wait(10 * LONG))
        await asyncio.sleep(0)
        server.kill()
        for waiting in (waiter, asked):
            with pytest.raises(TemporaryError):
                await bounded(waiting)
        assert await bounded(listener)
        # And while it stays away.
        assert await bounded(asyncio.create_task(heard.wait(10 * LONG)))
        with pytest.raises(TemporaryError):
            await a.acquire("s", "z", wait=10 * LONG)
        with pytest.raises(TemporaryError):
            await a.ask("f", {}, timeout=10 * LONG)
        with pytest.raises(TemporaryError):
            async with a.listen("u"):
                pass


async def test_what_could_not_be_asked_for_is_not_remembered_without_end(
    server: RedisServer, replicas: tuple[Watched, Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_UNCERTAIN", 5)
    a, _ = replicas
    server.kill()
    for number in range(20):
        with pytest.raises(TemporaryError):
            await a.acquire(f"s{number}", "owner")
    assert len(a._leases._uncertain) == 5


async def test_those_who_wait_over_a_restart_get_the_lease_or_an_error(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")

    async def take(replica: Watched, owner: str) -> None:
        with suppress(TemporaryError):
            # In any order, for the line is lost with the server; and until the next beat one
            # replica counts as lost for the other, who may take the lease away.
            assert await replica.acquire("s", owner, wait=10 * LONG) is None
            await replica.release("s", owner)

    waiters = []
    for count in range(6):
        waiters.append(asyncio.create_task(take(replicas[count % 2], f"y{count}")))
        await until_in_line(server, "s", count + 1)
    server.stop()
    server.start()
    await until_back(a)
    await until_back(b)
    for waiter in waiters:
        await bounded(waiter)

    # What is not known to be held was not kept either.
    await a.heartbeat()
    await b.heartbeat()
    assert await a.acquire("s", "z", wait=LONG) is None


async def until_heard(replica: Watched, by: Watched) -> str:
    """A cancellation. It is told again, since one that is slow may lose its connection again."""
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
    async with a.listen("t") as heard:
        if way == "pause":
            server.pause()
        else:
            getattr(server, way)()
        assert await bounded(asyncio.create_task(heard.wait(10 * LONG)))
        if way == "pause":
            server.resume()
        else:
            server.start()
        async with asyncio.timeout(LONG):
            await a.gaps.get()
            await b.gaps.get()
        await until_back(a)
        await until_back(b)
        assert await until_heard(a, by=b) == "e"
        assert await until_heard(b, by=b) == "e"
        while await heard.wait(0.01):
            pass
        await b.notify("t")
        assert await heard.wait(LONG)

    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=LONG))
    await until_in_line(server, "s", 1)
    await a.release("s", "x")
    assert await bounded(waiter) is None


@QUICK
@on_cluster_too
async def test_a_server_that_does_not_answer_is_an_error_in_bounded_time(
    server: RedisServer, replicas: tuple[Watched, Watched]
) -> None:
    a, b = replicas
    await a.acquire("s", "x")
    waiter = asyncio.create_task(b.acquire("s", "y", wait=10 * LONG))
    await until_in_line(server, "s", 1)
    asked = asyncio.create_task(b.ask("e", {}, timeout=10 * LONG))
    async with a.listen("t") as heard:
        server.pause()
        try:
            for waiting in (waiter, asked):
                with pytest.raises(TemporaryError):
                    await bounded(waiting)
            assert await bounded(asyncio.create_task(heard.wait(10 * LONG)))
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
async def test_a_cancelled_call_to_a_server_that_does_not_answer_ends(
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
    await until_back(b)
    await a.open()
    assert await a.acquire("s", "x") is None


async def test_closing_wakes_those_who_wait(replicas: tuple[Watched, Watched]) -> None:
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
