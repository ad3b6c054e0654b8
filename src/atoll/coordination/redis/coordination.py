"""Coordination over Redis: the contract of `base`, put together from its parts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from atoll.coordination.redis import scripts
from atoll.coordination.redis.approvals import RedisApprovals
from atoll.coordination.redis.commands import Commands
from atoll.coordination.redis.leases import RedisLeases
from atoll.coordination.redis.listener import PubSubListener
from atoll.coordination.redis.waiters import Waiters
from atoll.coordination.wakeup import WakeUp
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import timedelta

    from atoll.coordination.base import CoordinationObserver, LeaseHolder, Resolution, Subscription
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

DISCONNECTED_INTERVAL = 1.0
"""Seconds between the wake-ups of a subscription while the connection is lost."""


class RedisSubscription:
    def __init__(self, listener: PubSubListener, wake_up: WakeUp) -> None:
        self._listener = listener
        self._wake_up = wake_up

    async def wait(self, timeout: float) -> bool:
        if self._listener.disconnected:
            await self._wake_up.wait(min(timeout, DISCONNECTED_INTERVAL))
            return True
        return await self._wake_up.wait(timeout)


class RedisCoordination:
    def __init__(
        self, replica: str, url: str, settings: CoordinationSettings, execution_ttl: timedelta
    ) -> None:
        self.replica = replica
        self._observers: list[CoordinationObserver] = []
        self._prefix = settings.prefix
        self._presence_ttl = int(settings.presence_ttl.total_seconds() * 1000)
        self._execution_ttl = int(execution_ttl.total_seconds() * 1000)
        self._inbox = f"{self._prefix}:replica:{replica}"
        self._cancellations = f"{self._prefix}:cancel"
        self._listeners: dict[str, set[WakeUp]] = {}
        self._waiters = Waiters()
        self._heartbeat_lock = asyncio.Lock()
        self._commands = Commands(url, settings)
        self._listener = PubSubListener(
            self._commands,
            settings.read_timeout.total_seconds(),
            on_message=self._receive,
            on_interruption=self._interrupted,
        )
        shared = replica, settings, self._commands, self._waiters, self.alive
        self._leases = RedisLeases(*shared)
        self._approvals = RedisApprovals(*shared)

    def subscribe(self, observer: CoordinationObserver) -> None:
        self._observers.append(observer)

    async def open(self) -> None:
        self._waiters.shut_down = False
        try:
            await self._commands.open()
            await self._listener.open(self._inbox, self._cancellations)
            await self.heartbeat()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._listener.close()
        await self._commands.close()
        # They notice that the connection is closed.
        self._wake_all()

    def _receive(self, channel: str, content: str) -> None:
        if channel == self._inbox:
            self._waiters.wake(content)
        elif channel == self._cancellations:
            for observer in self._observers:
                self._call(observer.cancellation_requested, content)
        else:
            for wake_up in self._listeners.get(channel, ()):
                wake_up.wake()

    def _interrupted(self, connected: bool) -> None:
        self._wake_all()
        if connected:
            for observer in self._observers:
                self._call(observer.coordination_restored)

    def _call(self, callback: Callable[..., None], *args: str) -> None:
        # Not called from here: an exception of its must not end the listener.
        asyncio.get_running_loop().call_soon(callback, *args)

    def _wake_all(self) -> None:
        self._waiters.wake_all()
        for wake_ups in self._listeners.values():
            for wake_up in wake_ups:
                wake_up.wake()

    def _key(self, name: str, kind: str) -> str:
        return f"{{{self._prefix}:{name}}}:{kind}"

    def _channel(self, topic: str) -> str:
        return f"{self._prefix}:topic:{topic}"

    # Presence

    async def heartbeat(self) -> bool:
        async with self._heartbeat_lock:
            if self._waiters.shut_down:
                return False
            key = self._key(self.replica, "alive")
            present = await self._commands.run(scripts.HEARTBEAT, (key,), self._presence_ttl)
            await self._leases.undo_uncertain()
            return bool(present)

    async def alive(self, replica: str) -> bool:
        return bool(await self._commands.send("EXISTS", self._key(replica, "alive")))

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> LeaseHolder | None:
        return await self._leases.acquire(key, owner, wait)

    async def renew(self, key: str, owner: str) -> bool:
        return await self._leases.renew(key, owner)

    async def release(self, key: str, owner: str, *, topic: str | None = None) -> None:
        await self._leases.release(key, owner, "" if topic is None else self._channel(topic))

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

    # Notifications

    async def notify(self, topic: str) -> None:
        await self._commands.send("PUBLISH", self._channel(topic), "")

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Subscription]:
        channel, wake_up = self._channel(topic), WakeUp()
        self._listeners.setdefault(channel, set()).add(wake_up)
        try:
            await self._listener.subscribe(channel)
            yield RedisSubscription(self._listener, wake_up)
        finally:
            self._listeners[channel].discard(wake_up)
            if not self._listeners[channel]:
                del self._listeners[channel]
            await self._listener.unsubscribe(channel)

    # The end

    async def shutdown(self) -> None:
        self._waiters.shut_down = True
        try:
            async with asyncio.timeout(self._commands.timeout):
                await self._approvals.shut_down()
                await self._leases.release_all()
                async with self._heartbeat_lock:
                    await self._commands.send("DEL", self._key(self.replica, "alive"))
        except (TemporaryError, TimeoutError) as error:
            log.warning("coordination.shutdown_unfinished", error=str(error))
        finally:
            self._waiters.wake_all()
