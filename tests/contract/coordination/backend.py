"""
Two replicas and operations of a test on them, the same on every back-end.

The replicas send heartbeats automatically until they are lost. Time-outs in the tests are long:
they only bound a failure.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from atoll.coordination.base import LeaseHolder
from atoll.coordination.memory import MemoryCoordination, MemoryState
from atoll.coordination.redis import RedisCoordination
from atoll.errors import TemporaryError
from atoll.settings import CoordinationSettings
from atoll.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from atoll.coordination.base import Coordination

LONG = 60.0
SHORT_PRESENCE = timedelta(seconds=6)
"""For waiters that detect a lost replica by polling: they poll after a third of it."""
EXECUTION_TTL = timedelta(hours=1)


def settings(**values: Any) -> CoordinationSettings:
    long = timedelta(seconds=LONG)
    usual = {"presence_ttl": long, "read_timeout": long, "connect_timeout": long}
    values = {"lease_ttl": timedelta(hours=10)} | usual | values
    return CoordinationSettings(prefix=f"t-{uuid.uuid4().hex}", **values)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LONG):
        while not await condition():  # noqa: ASYNC110 - it is in another process, mostly
            await asyncio.sleep(0.01)


class Backend(ABC):
    a: Coordination
    b: Coordination

    @abstractmethod
    def replica(self, name: str) -> Coordination:
        """Another one, not open yet."""

    @abstractmethod
    async def leases_expire(self) -> None:
        """All leases expire, without a lost replica."""

    @abstractmethod
    async def lose(self, replica: Coordination) -> None:
        """It has not beaten for too long, yet is still there."""

    async def die(self, replica: Coordination) -> None:
        """It is no longer there at all."""
        await self.lose(replica)
        await replica.close()

    @abstractmethod
    async def holder(self, key: str) -> LeaseHolder | None:
        """The holder of a lease according to the back-end."""

    @abstractmethod
    async def in_line(self, key: str) -> int:
        """How many wait for a lease."""

    @abstractmethod
    async def is_empty(self) -> bool:
        """Whether the back-end holds nothing at all."""

    async def until_in_line(self, key: str, count: int) -> None:
        async def as_many() -> bool:
            return await self.in_line(key) == count

        await until(as_many)


class MemoryBackend(Backend):
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = MemoryState(self.clock)
        # By a clock that is moved, and questions are to outlast the loss of a replica.
        self.settings = settings(presence_ttl=SHORT_PRESENCE)
        self.a, self.b = self.replica("a"), self.replica("b")

    def replica(self, name: str) -> Coordination:
        return MemoryCoordination(name, self.settings, EXECUTION_TTL, self.clock, state=self.state)

    async def _pass(self, time: timedelta, *, without: Coordination | None = None) -> None:
        living = [each for each in (self.a, self.b) if await each.alive(each.replica)]
        self.clock.time += time.total_seconds()
        for replica in living:
            if replica is not without:
                await replica.heartbeat()

    async def leases_expire(self) -> None:
        await self._pass(self.settings.lease_ttl)

    async def lose(self, replica: Coordination) -> None:
        await self._pass(self.settings.presence_ttl, without=replica)

    async def holder(self, key: str) -> LeaseHolder | None:
        return self.state.leases.get(key)

    async def in_line(self, key: str) -> int:
        return len(self.state.waiters.get(key, ()))

    async def is_empty(self) -> bool:
        state = self.state
        shelves = (state.leases, state.approvals, state.cancellations, state.present)
        return not any((*(s.all() for s in shelves), state.waiters, state.listeners))


class RedisBackend(Backend):
    def __init__(self, url: str, client: Redis, values: dict[str, Any]) -> None:
        self.url = url
        self.client = client
        self.settings = settings(**values)
        self.a, self.b = self.replica("a"), self.replica("b")
        self.senders: dict[str, asyncio.Task[None]] = {}

    def replica(self, name: str) -> Coordination:
        return RedisCoordination(name, self.url, self.settings, EXECUTION_TTL)

    def send_heartbeats(self, replica: Coordination) -> None:
        async def send() -> None:
            while True:
                await asyncio.sleep(0.5)
                with suppress(TemporaryError):
                    await replica.heartbeat()

        self.senders[replica.replica] = asyncio.create_task(send())

    async def _stop(self, name: str) -> None:
        if (task := self.senders.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        for name in list(self.senders):
            await self._stop(name)

    def key(self, name: str, kind: str) -> str:
        return f"{{{self.settings.prefix}:{name}}}:{kind}"

    async def keys(self, kind: str) -> list[str]:
        return [key async for key in self.client.scan_iter(self.key("*", kind))]

    async def leases_expire(self) -> None:
        for key in await self.keys("lease"):
            await self.client.delete(key)

    async def lose(self, replica: Coordination) -> None:
        await self._stop(replica.replica)
        await self.client.delete(self.key(replica.replica, "alive"))

    async def holder(self, key: str) -> LeaseHolder | None:
        claim = await self.client.get(self.key(key, "lease"))
        return None if claim is None else LeaseHolder(*json.loads(str(claim).partition("\n")[0]))

    async def in_line(self, key: str) -> int:
        count: int = await self.client.zcard(self.key(key, "line"))
        return count

    async def is_empty(self) -> bool:
        keys = await self.keys("*")
        for key in keys:
            assert await self.client.pttl(key) != -1, f"{key} never expires"
        return not keys


@asynccontextmanager
async def memory_backend() -> AsyncIterator[MemoryBackend]:
    backend = MemoryBackend()
    await backend.a.open()
    await backend.b.open()
    yield backend
    await backend.a.close()
    await backend.b.close()


@asynccontextmanager
async def redis_backend(url: str, **values: Any) -> AsyncIterator[RedisBackend]:
    """`values` are settings other than the usual."""
    async with Redis.from_url(url, decode_responses=True) as client:
        backend = RedisBackend(url, client, values)
        try:
            await backend.a.open()
            await backend.b.open()
            backend.send_heartbeats(backend.a)
            backend.send_heartbeats(backend.b)
            yield backend
        finally:
            await backend.stop()
            await backend.a.close()
            await backend.b.close()
