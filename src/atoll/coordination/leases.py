"""
What this replica holds, and the heartbeat that keeps it.

A replica may act only while it counts as alive and the lease of what it acts on is its own. The
heartbeat renews both at a third of their time. When one is lost (Redis forgot it, or this process
stood still for too long) the work that it covers is stopped at once: the task inside the lease is
cancelled, and its `async with` raises `LeaseLost`. A process that has just come back from standing
still may not have heard yet, so `check` goes by the clock; whatever slips through between the check
and the act is refused by version in the store.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Self

import structlog

from atoll.errors import LeaseLost, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.settings import CoordinationSettings

log = structlog.get_logger(__name__)

IN_LINE_SECONDS = 86_400.0
"""How long one call waits in line; the next would stand at its end."""
AGAIN_SECONDS = 1.0
"""Pause between two tries to reach the back-end."""


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
        self._gap = asyncio.Event()
        self._unsettled_until = float("-inf")
        self.losses = 0
        """How often others took this replica for lost: what it had may be theirs since."""

    @property
    def replica(self) -> str:
        return self._coordination.replica

    @property
    def valid(self) -> bool:
        """Whether others still take this replica for alive."""
        return self._clock.monotonic() < self._present_until

    def lease(
        self,
        key: str,
        owner: str,
        *,
        wait: float = IN_LINE_SECONDS,
        instead: Sequence[str] = (),
    ) -> Lease:
        """
        The right to act on `key` inside `async with`, or on one of `instead` if that is free and
        `key` is not; waited for in the line of `key` when none is.
        """
        return Lease(self, key, owner, wait, instead)

    async def try_lease(self, key: str, owner: str | None = None) -> Lease | None:
        """
        The same without waiting; None when another has it. To be entered at once. Without an owner
        it is the replica's, which is let in twice.
        """
        owner = owner or f"{self.replica}/{key}"
        if await self._coordination.acquire(key, owner) is not None:
            return None
        return Lease(self, key, owner, 0.0, ())

    def own(self) -> str:
        """An owner that is nobody else, not even another task of this replica."""
        return f"{self.replica}/{secrets.token_hex(8)}"

    async def start(self) -> None:
        """Be present, before anything is done."""
        await self.beat()

    async def run(self) -> None:
        """The heartbeat."""
        while True:
            self._gap.clear()
            try:
                async with asyncio.timeout(self._pause()):
                    await self._gap.wait()
            except TimeoutError:
                pass
            try:
                await self.beat()
                await self._renew()
            except TemporaryError as error:
                log.warning("heartbeat.failed", code=error.code, error=error.message)
            except Exception as error:
                log.error("heartbeat.failed", exc_info=error)
            self._drop_expired()

    def gap(self) -> None:
        """
        The back-end was away and is back, perhaps without what it knew: beat at once, and take no
        other replica for lost before it had the time to do the same.
        """
        self._unsettled_until = self._clock.monotonic() + self._presence * 2 / 3
        self._gap.set()

    @property
    def settled(self) -> bool:
        """Whether a replica that does not beat is lost, and not only unheard of yet."""
        return self._clock.monotonic() >= self._unsettled_until

    def _pause(self) -> float:
        if self._present_until - self._clock.monotonic() > self._presence * 0.7:
            return min(self._presence, self._ttl) / 3
        return min(AGAIN_SECONDS, self._presence / 6)

    async def beat(self) -> None:
        """Be present from now on; when it was not, what it held is lost."""
        # From when it was sent: the back-end counts from when it came, which is later.
        now = self._clock.monotonic()
        was_present = await self._coordination.beat()
        if not was_present and self._present_until > float("-inf"):
            log.warning("replica.was_lost", replica=self.replica)
            self.gap()
            self.losses += 1
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
        for key in (lease.key, *lease.instead) if lease.instead else ():
            now = self._clock.monotonic()
            if await self._coordination.acquire(key, lease.owner) is None:
                lease.key, lease.until = key, now + self._ttl
                self._held.add(lease)
                return
        now = self._clock.monotonic()
        holder = await self._coordination.acquire(lease.key, lease.owner, wait=lease.wait)
        while holder is not None:
            now = self._clock.monotonic()
            holder = await self._coordination.acquire(lease.key, lease.owner, wait=IN_LINE_SECONDS)
        if self._clock.monotonic() - now > self._ttl / 3:
            now = await self._from_now_on(lease)
        lease.until = now + self._ttl
        self._held.add(lease)

    async def _from_now_on(self, lease: Lease) -> float:
        """Hold what was long waited for, and so since nobody here knows when, from now on."""
        now = self._clock.monotonic()
        try:
            if not await self._coordination.renew(lease.key, lease.owner):
                raise LeaseLost(f"The lease of {lease.key} was lost.")
        except BaseException:
            await self.give_back(lease)
            raise
        return now

    async def give_back(self, lease: Lease) -> None:
        self._held.discard(lease)
        try:
            await self._coordination.release(lease.key, lease.owner)
        except TemporaryError as error:
            # What it was for is done, and it expires.
            log.warning("lease.not_released", key=lease.key, error=error.message)

    def drop(self, lease: Lease) -> None:
        self._held.discard(lease)

    def now(self) -> float:
        return self._clock.monotonic()


class Lease:
    def __init__(
        self, leases: Leases, key: str, owner: str, wait: float, instead: Sequence[str]
    ) -> None:
        self._leases = leases
        self.instead = instead
        self.key = key
        self.owner = owner
        self.wait = wait
        self.until = float("-inf")
        self._lost = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    @property
    def valid(self) -> bool:
        return not self._lost and self._leases.valid and self._leases.now() < self.until

    def check(self) -> None:
        """Raise `LeaseLost` unless it is held at this very moment."""
        if not self.valid:
            raise LeaseLost(f"The lease of {self.key} was lost.")

    def lose(self) -> None:
        """Stop what goes on inside it."""
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
            await self._leases.give_back(self)
            return
        assert task is not None
        # Ours to take back; a cancellation from elsewhere goes on.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise LeaseLost(f"The lease of {self.key} was lost.") from error
