"""The face of coordination over Redis."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from atoll.coordination.base import MAX_MESSAGES
from atoll.coordination.bell import Bell
from atoll.coordination.content import checked
from atoll.coordination.redis import scripts
from atoll.coordination.redis.approvals import Approvals
from atoll.coordination.redis.commands import Commands
from atoll.coordination.redis.ear import Ear
from atoll.coordination.redis.leases import Leases
from atoll.coordination.redis.waiting import Waiting
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import timedelta

    from atoll.coordination.base import Heard, Holder, Resolution
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

DEAF_LOOK = 1.0
"""Seconds after which one who listens while the connection is lost is told to look."""


class Listener:
    def __init__(self, ear: Ear, bell: Bell) -> None:
        self._ear = ear
        self._bell = bell

    async def wait(self, timeout: float) -> bool:
        if self._ear.deaf:
            await self._bell.wait(min(timeout, DEAF_LOOK))
            return True
        return await self._bell.wait(timeout)


class RedisCoordination:
    def __init__(
        self, replica: str, url: str, settings: CoordinationSettings, execution_ttl: timedelta
    ) -> None:
        self.replica = replica
        self.on_cancel: Callable[[str], None] = lambda _: None
        self.on_gap: Callable[[], None] = lambda: None
        self._prefix = settings.prefix
        self._presence_ttl = int(settings.presence_ttl.total_seconds() * 1000)
        self._lease_ttl = int(settings.lease_ttl.total_seconds() * 1000)
        self._execution_ttl = int(execution_ttl.total_seconds() * 1000)
        self._inbox = f"{self._prefix}:replica:{replica}"
        self._cancellations = f"{self._prefix}:cancel"
        self._listeners: dict[str, set[Bell]] = {}
        self._waiting = Waiting()
        self._beating = asyncio.Lock()
        self._commands = Commands(url, settings)
        self._ear = Ear(
            self._commands,
            settings.read_timeout.total_seconds(),
            hear=self._hear,
            missed=self._missed,
        )
        shared = replica, settings, self._commands, self._waiting, self.alive
        self._leases = Leases(*shared)
        self._approvals = Approvals(*shared)

    async def open(self) -> None:
        self._waiting.ended = False
        try:
            await self._commands.open()
            await self._ear.open(self._inbox, self._cancellations)
            await self.beat()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._ear.close()
        await self._commands.close()
        # They find that the connection is gone.
        self._ring_all()

    def _hear(self, channel: str, content: str) -> None:
        if channel == self._inbox:
            self._waiting.ring(content)
        elif channel == self._cancellations:
            self._call(self.on_cancel, content)
        else:
            for bell in self._listeners.get(channel, ()):
                bell.ring()

    def _missed(self, connected: bool) -> None:
        self._ring_all()
        if connected:
            self._call(self.on_gap)

    def _call(self, callback: Callable[..., None], *args: str) -> None:
        # Not from here: what it raises is not to end the ear.
        asyncio.get_running_loop().call_soon(callback, *args)

    def _ring_all(self) -> None:
        self._waiting.ring_all()
        for bells in self._listeners.values():
            for bell in bells:
                bell.ring()

    def _key(self, name: str, kind: str) -> str:
        return f"{{{self._prefix}:{name}}}:{kind}"

    # Presence

    async def beat(self) -> bool:
        async with self._beating:
            if self._waiting.ended:
                return False
            key = self._key(self.replica, "alive")
            present = await self._commands.run(scripts.BEAT, (key,), self._presence_ttl)
            await self._leases.take_back()
            return bool(present)

    async def alive(self, replica: str) -> bool:
        return bool(await self._commands.send("EXISTS", self._key(replica, "alive")))

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> Holder | None:
        return await self._leases.acquire(key, owner, wait)

    async def renew(self, key: str, owner: str) -> bool:
        return await self._leases.renew(key, owner)

    async def release(self, key: str, owner: str) -> None:
        await self._leases.release(key, owner)

    async def holder(self, key: str) -> Holder | None:
        return await self._leases.holder(key)

    # The interactive window

    async def open_window(self, session_id: str, execution_id: str) -> None:
        key = self._key(session_id, "window")
        await self._commands.send("SET", key, execution_id, "PX", self._lease_ttl)

    async def close_window(self, session_id: str, execution_id: str) -> None:
        key = self._key(session_id, "window")
        await self._commands.run(scripts.CLOSE_WINDOW, (key,), execution_id)

    async def window(self, session_id: str) -> str | None:
        execution_id: str | None = await self._commands.send("GET", self._key(session_id, "window"))
        return execution_id

    # Approvals

    async def ask(
        self, execution_id: str, question: dict[str, Any], *, timeout: float
    ) -> dict[str, Any] | None:
        return await self._approvals.ask(execution_id, question, timeout)

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        return await self._approvals.question(execution_id)

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], *, question: dict[str, Any] | None = None
    ) -> Resolution:
        return await self._approvals.resolve(execution_id, answer, question)

    # Cancellation

    async def cancel(self, execution_id: str, reason: str) -> None:
        await self._approvals.cancel(execution_id, reason, self._execution_ttl)

    async def cancelled(self, execution_id: str) -> str | None:
        return await self._approvals.cancelled(execution_id)

    # Messages

    async def push(self, execution_id: str, message: str) -> None:
        pushed = await self._commands.run(
            scripts.PUSH,
            (self._key(execution_id, "queue"),),
            checked(message),
            MAX_MESSAGES,
            self._execution_ttl,
        )
        if not pushed:
            raise TemporaryError(
                f"{MAX_MESSAGES} messages wait for {execution_id}; send this one once it has read"
                " them.",
                code="queue_full",
            )

    async def drain(self, execution_id: str) -> list[str]:
        key = self._key(execution_id, "queue")
        messages: list[str] = await self._commands.run(scripts.DRAIN, (key,))
        return messages

    # Telling others

    async def tell(self, topic: str) -> None:
        await self._commands.send("PUBLISH", f"{self._prefix}:topic:{topic}", "")

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Heard]:
        channel, bell = f"{self._prefix}:topic:{topic}", Bell()
        self._listeners.setdefault(channel, set()).add(bell)
        try:
            await self._ear.subscribe(channel)
            yield Listener(self._ear, bell)
        finally:
            self._listeners[channel].discard(bell)
            if not self._listeners[channel]:
                del self._listeners[channel]
            await self._ear.unsubscribe(channel)

    # The end

    async def clean(self, session_id: str, execution_id: str) -> None:
        await self._leases.clean(session_id, execution_id, self._key(session_id, "window"))
        await self._approvals.clean(execution_id, self._key(execution_id, "queue"))

    async def shutdown(self) -> None:
        self._waiting.ended = True
        try:
            async with asyncio.timeout(self._commands.patience):
                await self._approvals.end()
                await self._leases.give_back()
                async with self._beating:
                    await self._commands.send("DEL", self._key(self.replica, "alive"))
        except (TemporaryError, TimeoutError) as error:
            log.warning("coordination.shutdown_unfinished", error=str(error))
        finally:
            self._waiting.ring_all()
