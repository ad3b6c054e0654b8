"""
The leases that this replica holds, and the heartbeat that keeps them.

A replica may act only while it counts as alive and holds the lease of what it acts on. The
heartbeat renews both after a third of their time. When one is lost (Redis forgot it, or this
process was suspended for too long), the work that it covers is stopped at once: the task inside
the lease is cancelled, and its `async with` raises `LeaseLost`. A process that has just been
resumed may not know yet that it lost its leases, so `check` compares the clock; a write that slips
through between the check and the act is refused by its version in the store.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Self

import structlog

from atoll.errors import LeaseLost, PresenceLost, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

MAX_WAIT = 86_400.0
"""Seconds that one call waits for a lease."""
RETRY_DELAY = 1.0
"""Longest pause in seconds between two heartbeats while the last one failed."""


class Presence:
    """A time in which this replica counts as alive for the others without interruption."""

    def __init__(self) -> None:
        self._ended = False

    def end(self) -> None:
        self._ended = True

    def check(self) -> None:
        """Raise `PresenceLost` if other replicas may have taken over what this one owned."""
        if self._ended:
            raise PresenceLost("This replica counted as lost. Another one may own its work.")


class Leases:
    def __init__(
        self,
        coordination: Coordination,
        clock: Clock,
        settings: CoordinationSettings,
    ) -> None:
        self._coordination = coordination
        self._clock = clock
        self._ttl = settings.lease_ttl.total_seconds()
        self._presence = settings.presence_ttl.total_seconds()
        self._present_until = float("-inf")
        self._held: set[Lease] = set()
        self._restored = asyncio.Event()
        self._reliable_from = float("-inf")
        self.presence = Presence()
        """The current one; it is replaced when this replica counted as lost."""
        coordination.subscribe(self)

    @property
    def replica(self) -> str:
        return self._coordination.replica

    @property
    def valid(self) -> bool:
        """Whether other replicas still consider this one alive."""
        return self._clock.monotonic() < self._present_until

    def lease(
        self,
        key: str,
        owner: str,
        *,
        alternatives: Sequence[str] = (),
        topic: str | None = None,
    ) -> Lease:
        """
        The lease of `key` inside `async with`, or that of one of `alternatives` if it is free and
        `key` is not. If none is free, wait for `key`. Releasing it notifies `topic`.
        """
        return Lease(self, key, owner, alternatives, topic)

    async def try_lease(self, key: str, owner: str | None = None) -> Lease | None:
        """
        The same without waiting; None if it is held. Enter it at once. Without `owner` the replica
        itself owns it, and may enter it twice.
        """
        owner = owner or f"{self.replica}/{key}"
        if await self._coordination.acquire(key, owner) is not None:
            return None
        return Lease(self, key, owner)

    def new_owner(self) -> str:
        """A unique owner: two tasks of this replica exclude each other."""
        return f"{self.replica}/{secrets.token_hex(8)}"

    async def start(self) -> None:
        """Send the first heartbeat, before anything else is done."""
        await self.heartbeat()

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._restored.clear()
            try:
                async with asyncio.timeout(self._pause()):
                    await self._restored.wait()
            except TimeoutError:
                pass
            try:
                await self.heartbeat()
                await self._renew()
            except TemporaryError as error:
                log.warning("heartbeat.failed", code=error.code, error=error.message)
            except Exception as error:
                log.error("heartbeat.failed", exc_info=error)
            self._drop_expired()

    def cancellation_requested(self, execution_id: str) -> None:
        """Cancellations do not concern leases."""

    def coordination_restored(self) -> None:
        """
        The back-end is available again, perhaps without its data: send a heartbeat at once, and
        give the other replicas time to do the same before any of them counts as lost.
        """
        self._reliable_from = self._clock.monotonic() + self._presence * 2 / 3
        self._restored.set()

    @property
    def presence_reliable(self) -> bool:
        """False shortly after an outage, while live replicas may not have sent a heartbeat yet."""
        return self._clock.monotonic() >= self._reliable_from

    def _pause(self) -> float:
        if self._present_until - self._clock.monotonic() > self._presence * 0.7:
            return min(self._presence, self._ttl) / 3
        return min(RETRY_DELAY, self._presence / 6)

    async def heartbeat(self) -> None:
        """Send one; if this replica had been lost meanwhile, so are its leases."""
        # Before the call: the back-end counts from when the heartbeat arrives, which is later.
        now = self._clock.monotonic()
        was_present = await self._coordination.heartbeat()
        if not was_present and self._present_until > float("-inf"):
            log.warning("replica.was_lost", replica=self.replica)
            self.coordination_restored()
            self.presence.end()
            self.presence = Presence()
            for lease in list(self._held):
                lease.lose()
        self._present_until = now + self._presence

    async def _renew(self) -> None:
        for lease in list(self._held):
            now = self._clock.monotonic()
            if lease.until - now > self._ttl * 2 / 3:
                continue
            if await self._coordination.renew(lease.key, lease.owner):
                lease.until = now + self._ttl
            elif lease in self._held:
                lease.lose()

    def _drop_expired(self) -> None:
        for lease in list(self._held):
            if not lease.valid:
                lease.lose()

    async def acquire(self, lease: Lease) -> None:
        for key in (lease.key, *lease.alternatives) if lease.alternatives else ():
            now = self._clock.monotonic()
            if await self._coordination.acquire(key, lease.owner) is None:
                lease.key, lease.until = key, now + self._ttl
                self._held.add(lease)
                return
        while True:
            now = self._clock.monotonic()
            if await self._coordination.acquire(lease.key, lease.owner, wait=MAX_WAIT) is None:
                break
        if self._clock.monotonic() - now > self._ttl / 3:
            now = await self._renewed_at(lease)
        lease.until = now + self._ttl
        self._held.add(lease)

    async def _renewed_at(self, lease: Lease) -> float:
        """Renew a lease that was granted at an unknown moment of a long wait; when that was."""
        now = self._clock.monotonic()
        try:
            if not await self._coordination.renew(lease.key, lease.owner):
                raise LeaseLost(f"The lease of {lease.key} was lost.")
        except BaseException:
            await self.release(lease)
            raise
        return now

    async def release(self, lease: Lease) -> None:
        self._held.discard(lease)
        try:
            await self._coordination.release(lease.key, lease.owner, topic=lease.topic)
        except TemporaryError as error:
            # Ignored: the work is done, and the lease will expire.
            log.warning("lease.not_released", key=lease.key, error=error.message)

    def drop(self, lease: Lease) -> None:
        self._held.discard(lease)

    def now(self) -> float:
        return self._clock.monotonic()


class Lease:
    def __init__(
        self,
        leases: Leases,
        key: str,
        owner: str,
        alternatives: Sequence[str] = (),
        topic: str | None = None,
    ) -> None:
        self._leases = leases
        self.alternatives = alternatives
        self.topic = topic
        self.key = key
        self.owner = owner
        self.until = float("-inf")
        self.released = False
        self._lost = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    @property
    def valid(self) -> bool:
        return not self._lost and self._leases.valid and self._leases.now() < self.until

    def check(self) -> None:
        """Raise `LeaseLost` unless it is held now."""
        if not self.valid:
            raise LeaseLost(f"The lease of {self.key} was lost.")

    def lose(self) -> None:
        """Cancel the task inside it."""
        self._leases.drop(self)
        if self._lost:
            return
        self._lost = True
        log.warning("lease.lost", key=self.key, owner=self.owner)
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> Self:
        await self._leases.acquire(self)
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self._lost:
            self.released = True
            await self._leases.release(self)
            return
        assert task is not None
        # Undo the cancellation of `lose`; one from elsewhere still counts.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise LeaseLost(f"The lease of {self.key} was lost.") from error
