"""
Coordination inside one process, without a server.

Taking a free lease does not yield to the event loop. Expired entries are ignored when read and
removed with each heartbeat. Replicas that share one `MemoryState` see each other, which is how the
contract is tested with several of them; they must run on the same loop.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from atoll.coordination.base import CANCELLED, SHUTDOWN, LeaseHolder
from atoll.coordination.payload import decode, encode
from atoll.coordination.wakeup import WakeUp
from atoll.errors import CoordinationUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import timedelta

    from atoll.clock import Clock
    from atoll.coordination.base import CoordinationObserver, Resolution, Subscription
    from atoll.settings import CoordinationSettings

KEPT_AFTER_TIMEOUT = 60.0
"""Seconds that an approval outlives its time-out."""

V = TypeVar("V")


class ExpiringDict(Generic[V]):
    """A dictionary whose entries expire."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[V, float]] = {}

    def put(self, key: str, value: V, seconds: float) -> None:
        self._entries[key] = (value, self._clock.monotonic() + seconds)

    def get(self, key: str) -> V | None:
        value, until = self._entries.get(key, (None, 0.0))
        if value is None or self._clock.monotonic() < until:
            return value
        del self._entries[key]
        return None

    def left(self, key: str) -> float:
        """Seconds until it expires; 0 if it is absent."""
        return self._entries[key][1] - self._clock.monotonic() if self.get(key) is not None else 0.0

    def drop(self, key: str) -> None:
        self._entries.pop(key, None)

    def all(self) -> list[tuple[str, V]]:
        now = self._clock.monotonic()
        return [(key, value) for key, (value, until) in self._entries.items() if now < until]

    def sweep(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, (_, until) in self._entries.items() if until <= now]:
            del self._entries[key]


@dataclass(slots=True, eq=False)
class Waiter:
    """Waits for a lease."""

    holder: LeaseHolder
    wake_up: WakeUp = field(default_factory=WakeUp)


@dataclass(slots=True, eq=False)
class PendingApproval:
    replica: str
    question: str
    deadline: float
    answer: str | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, answer: str | None) -> None:
        self.answer = answer
        self.settled.set()


class MemoryState:
    """The state that the replicas in one process share."""

    def __init__(self, clock: Clock) -> None:
        self.present: ExpiringDict[bool] = ExpiringDict(clock)
        self.leases: ExpiringDict[LeaseHolder] = ExpiringDict(clock)
        self.waiters: dict[str, list[Waiter]] = {}
        """By lease, in the order in which they asked."""
        self.approvals: ExpiringDict[PendingApproval] = ExpiringDict(clock)
        self.cancellations: ExpiringDict[str] = ExpiringDict(clock)
        self.listeners: dict[str, set[WakeUp]] = {}
        self.replicas: list[MemoryCoordination] = []

    def sweep(self) -> None:
        self.leases.sweep()
        self.cancellations.sweep()
        self.approvals.sweep()
        self.present.sweep()


class MemoryCoordination:
    def __init__(
        self,
        replica: str,
        settings: CoordinationSettings,
        execution_ttl: timedelta,
        clock: Clock,
        *,
        state: MemoryState | None = None,
    ) -> None:
        self.replica = replica
        self._lease_ttl = settings.lease_ttl.total_seconds()
        self._presence_ttl = settings.presence_ttl.total_seconds()
        self._execution_ttl = execution_ttl
        self._clock = clock
        self._state = MemoryState(clock) if state is None else state
        self._shut_down = False
        self._observers: list[CoordinationObserver] = []

    def subscribe(self, observer: CoordinationObserver) -> None:
        self._observers.append(observer)

    async def open(self) -> None:
        self._shut_down = False
        if self not in self._state.replicas:
            self._state.replicas.append(self)
        await self.heartbeat()

    async def close(self) -> None:
        if self in self._state.replicas:
            self._state.replicas.remove(self)

    # Presence

    async def heartbeat(self) -> bool:
        if self._shut_down:
            return False
        self._state.sweep()
        present = self._state.present.get(self.replica) is not None
        self._state.present.put(self.replica, True, self._presence_ttl)
        return present

    async def alive(self, replica: str) -> bool:
        return self._state.present.get(replica) is not None

    def _is_lost(self, replica: str) -> bool:
        return replica != self.replica and self._state.present.get(replica) is None

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> LeaseHolder | None:
        me = LeaseHolder(self.replica, owner)
        holder = self._take(key, me)
        if holder is None or wait <= 0:
            return holder
        return await self._wait_in_line(key, me, wait)

    def _take(self, key: str, me: LeaseHolder) -> LeaseHolder | None:
        if self._shut_down:
            raise CoordinationUnavailable(
                "This replica is shutting down; send the request again.",
            )
        holder = self._state.leases.get(key)
        if holder is None or self._is_lost(holder.replica):
            first = self._first(key)
            if first is not None and first.holder != me:
                self._state.leases.drop(key)
                first.wake_up.wake()
                return first.holder
        elif holder != me:
            return holder
        self._state.leases.put(key, me, self._lease_ttl)
        return None

    async def _wait_in_line(self, key: str, me: LeaseHolder, wait: float) -> LeaseHolder | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        waiter = Waiter(me)
        try:
            while True:
                line = self._state.waiters.setdefault(key, [])
                if waiter not in line:  # New, or removed because this replica seemed lost.
                    line.append(waiter)
                # Nothing wakes a waiter when a lease expires.
                interval = min(self._presence_ttl / 3, self._state.leases.left(key) or wait)
                await waiter.wake_up.wait(min(deadline - loop.time(), interval))
                holder = self._take(key, me)
                if holder is None or loop.time() >= deadline:
                    return holder
        finally:
            self._leave_line(key, waiter)

    def _first(self, key: str) -> Waiter | None:
        line = self._state.waiters.get(key)
        while line and self._is_lost(line[0].holder.replica):
            line.pop(0)
        return line[0] if line else None

    def _leave_line(self, key: str, waiter: Waiter) -> None:
        line = self._state.waiters.get(key, [])
        if waiter in line:
            line.remove(waiter)
        if not line:
            self._state.waiters.pop(key, None)
        self._wake_first(key)

    def _wake_first(self, key: str) -> None:
        first = self._first(key)
        if first is not None and self._state.leases.get(key) is None:
            first.wake_up.wake()

    async def renew(self, key: str, owner: str) -> bool:
        me = LeaseHolder(self.replica, owner)
        if self._state.leases.get(key) != me:
            return False
        self._state.leases.put(key, me, self._lease_ttl)
        return True

    async def release(self, key: str, owner: str, *, topic: str | None = None) -> None:
        if self._state.leases.get(key) == LeaseHolder(self.replica, owner):
            self._state.leases.drop(key)
            self._wake_first(key)
        if topic is not None:
            await self.notify(topic)

    # Approvals

    async def ask(
        self, execution_id: str, question: dict[str, Any], *, timeout: float
    ) -> dict[str, Any] | None:
        approval = PendingApproval(
            self.replica, encode(question), self._clock.monotonic() + timeout
        )
        if self._shut_down:
            return dict(SHUTDOWN)
        former = self._state.approvals.get(execution_id)
        if former is not None and former.answer is None:
            former.settle(None)
        elif (
            former is not None
            and former.answer not in (None, encode(SHUTDOWN))
            and former.question == approval.question
            and former.replica != self.replica
        ):
            # Answered to a replica that was lost before it delivered the answer.
            approval.settle(former.answer)
        self._state.approvals.put(execution_id, approval, timeout + KEPT_AFTER_TIMEOUT)
        if self._state.cancellations.get(execution_id) is not None:
            approval.settle(encode(CANCELLED))
        try:
            async with asyncio.timeout(timeout):
                await approval.settled.wait()
        except TimeoutError:
            pass
        finally:
            if approval.answer is None and self._state.approvals.get(execution_id) is approval:
                self._state.approvals.drop(execution_id)
        return None if approval.answer is None else decode(approval.answer)

    def _pending(self, execution_id: str) -> PendingApproval | None:
        approval = self._state.approvals.get(execution_id)
        if (
            approval is None
            or approval.answer is not None
            or approval.deadline <= self._clock.monotonic()
            or self._is_lost(approval.replica)
        ):
            return None
        return approval

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        pending = self._pending(execution_id)
        return None if pending is None else decode(pending.question)

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], *, question: dict[str, Any] | None = None
    ) -> Resolution:
        text = encode(answer)
        pending = self._pending(execution_id)
        if pending is not None:
            if question is not None and pending.question != encode(question):
                return "gone"
            pending.settle(text)
            return "resolved"
        approval = self._state.approvals.get(execution_id)
        if approval is None or approval.answer is None or self._is_lost(approval.replica):
            return "gone"
        if question is not None and approval.question != encode(question):
            return "gone"
        return "already"

    # Cancellation

    async def cancel(self, execution_id: str, reason: str) -> None:
        if self._state.cancellations.get(execution_id) is None:
            self._state.cancellations.put(execution_id, reason, self._execution_ttl.total_seconds())
        approval = self._state.approvals.get(execution_id)
        if approval is not None and approval.answer is None:
            approval.settle(encode(CANCELLED))
        loop = asyncio.get_running_loop()
        for replica in self._state.replicas:
            for observer in replica._observers:
                loop.call_soon(observer.cancellation_requested, execution_id)

    async def cancelled(self, execution_id: str) -> str | None:
        return self._state.cancellations.get(execution_id)

    # Notifications

    async def notify(self, topic: str) -> None:
        for wake_up in self._state.listeners.get(topic, ()):
            wake_up.wake()

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Subscription]:
        wake_up = WakeUp()
        self._state.listeners.setdefault(topic, set()).add(wake_up)
        try:
            yield wake_up
        finally:
            self._state.listeners[topic].discard(wake_up)
            if not self._state.listeners[topic]:
                del self._state.listeners[topic]

    # The end

    async def shutdown(self) -> None:
        self._shut_down = True
        for _, approval in self._state.approvals.all():
            if approval.replica == self.replica and approval.answer is None:
                approval.settle(encode(SHUTDOWN))
        for key, holder in self._state.leases.all():
            if holder.replica == self.replica:
                await self.release(key, holder.owner)
        for line in self._state.waiters.values():
            for waiter in line:
                if waiter.holder.replica == self.replica:
                    waiter.wake_up.wake()
        self._state.present.drop(self.replica)
