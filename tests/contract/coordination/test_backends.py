"""Differences between the back-ends: speed in memory, keys and addresses of Redis."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis

from atoll.clock import SystemClock
from atoll.coordination.base import LeaseHolder
from atoll.coordination.memory import MemoryCoordination
from atoll.coordination.redis import RedisCoordination
from atoll.coordination.redis.commands import complete
from atoll.errors import InvalidRequest, TemporaryError
from tests.servers.redis import RedisServer

from .backend import EXECUTION_TTL, LONG, memory_backend, redis_backend, settings, until

pytestmark = pytest.mark.anyio


async def test_in_memory_a_free_lease_is_acquired_without_suspending() -> None:
    async with memory_backend() as backend:
        for call in (backend.a.acquire("s", "x", wait=LONG), backend.a.release("s", "x")):
            with pytest.raises(StopIteration):
                call.send(None)


async def test_expired_entries_in_memory_are_removed() -> None:
    async with memory_backend() as backend:
        await backend.a.cancel("e", "user")
        backend.clock.time += EXECUTION_TTL.total_seconds()
        await backend.a.heartbeat()
        assert await backend.a.cancelled("e") is None


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_waiter_gets_a_lease_when_it_expires(kind: str, redis_server: RedisServer) -> None:
    short = settings(lease_ttl=timedelta(seconds=0.3), presence_ttl=timedelta(seconds=LONG))
    if kind == "memory":
        a: MemoryCoordination | RedisCoordination = MemoryCoordination(
            "a", short, EXECUTION_TTL, SystemClock()
        )
    else:
        a = RedisCoordination("a", redis_server.url, short, EXECUTION_TTL)
    await a.open()
    try:
        await a.acquire("s", "x")
        # A third of the presence is longer than this.
        assert await a.acquire("s", "y", wait=LONG / 6) is None
        assert not await a.renew("s", "x")
        assert await a.acquire("s", "z", wait=LONG / 6) is None
    finally:
        await a.close()


async def test_a_replica_without_heartbeats_is_lost(redis_server: RedisServer) -> None:
    short = settings(presence_ttl=timedelta(seconds=0.3))
    a = RedisCoordination("a", redis_server.url, short, EXECUTION_TTL)
    b = RedisCoordination("b", redis_server.url, short, EXECUTION_TTL)
    await a.open()
    await b.open()
    try:
        await a.acquire("s", "x")
        assert await b.acquire("s", "y", wait=LONG) is None
        assert not await a.heartbeat()
    finally:
        await a.close()
        await b.close()


async def test_every_key_has_a_hash_tag_and_expires(redis_server: RedisServer) -> None:
    async with redis_backend(redis_server.url) as backend:
        await backend.a.acquire("s", "e")
        waiter = asyncio.create_task(backend.b.acquire("s", "f", wait=LONG))
        await backend.until_in_line("s", 1)
        await backend.a.cancel("e", "user")
        await backend.a.ask("e", {}, timeout=LONG)
        assert not await backend.is_empty()
        kinds = {key.partition("}:")[2] for key in await backend.keys("*")}
        assert kinds == {"alive", "approval", "cancel", "lease", "line", "places"}
        await backend.a.release("s", "e")
        assert await waiter is None


async def test_scripts_are_loaded_again_after_the_server_forgot_them(
    redis_server: RedisServer,
) -> None:
    async with redis_backend(redis_server.url) as backend:
        await backend.a.acquire("s", "x")
        async with Redis.from_url(redis_server.url) as client:
            await client.script_flush()
        assert await backend.b.acquire("s", "y") == LeaseHolder("a", "x")


async def test_a_claim_with_a_lost_response_is_undone_by_a_heartbeat(
    redis_server: RedisServer,
) -> None:
    hasty = settings(
        read_timeout=timedelta(seconds=2),
        connect_timeout=timedelta(seconds=2),
        presence_ttl=timedelta(seconds=LONG),
    )
    a = RedisCoordination("a", redis_server.url, hasty, EXECUTION_TTL)
    await a.open()

    async def taken_back() -> bool:
        with suppress(TemporaryError):
            return await a.heartbeat() and await a.acquire("s", "z") is None
        return False

    try:
        redis_server.pause()
        try:
            for owner in ("x", "y"):
                with pytest.raises(TemporaryError):
                    await a.acquire("s", owner, wait=LONG)
        finally:
            redis_server.resume()
        # It got the lease when the server resumed, or will not get it.
        await until(taken_back)
        await a.release("s", "z")
    finally:
        await a.close()


async def test_the_address_of_a_server_can_be_a_socket(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="secret", socket=True) as server:
        a = RedisCoordination("a", server.socket_url, settings(), EXECUTION_TTL)
        await a.open()
        assert await a.acquire("s", "x") is None
        await a.close()


async def test_errors_do_not_show_the_password(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as bad:
        RedisCoordination("a", "redis://:sec/ret@host:1/0", settings(), EXECUTION_TTL)
    assert "sec" not in str(bad.value)
    assert bad.value.__cause__ is None

    with RedisServer(tmp_path, password="right") as server:
        wrong = server.url.replace("right", "wrongsecret")
        a = RedisCoordination("a", wrong, settings(), EXECUTION_TTL)
        with pytest.raises(TemporaryError) as refused:
            await a.open()
        server.kill()
        with pytest.raises(TemporaryError) as gone:
            await a.open()
        await a.close()
    for error in (refused.value, gone.value):
        assert error.code == "coordination_unavailable"
        assert "wrongsecret" not in str(error)
        assert f"127.0.0.1:{server.port}" in str(error)


async def test_work_completes_when_its_caller_is_cancelled_twice() -> None:
    go_on = asyncio.Event()
    done = False

    async def work() -> None:
        nonlocal done
        await go_on.wait()
        done = True

    caller = asyncio.create_task(complete(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done
