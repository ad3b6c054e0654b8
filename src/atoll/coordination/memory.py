"""
Coordination inside one process: the contract without a server.

A free lease is taken without giving up the turn on the loop. What has expired is noticed when
somebody looks, and swept away with each beat. Replicas that share one `MemoryState` see each other,
which is how the contract is tested with two of them; they must run on the same loop.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from atoll.coordination.base import CANCELLED, MAX_MESSAGES, SHUTDOWN, Holder
from atoll.coordination.bell import Bell
from atoll.coordination.content import checked, packed, unpacked
from atoll.errors import CoordinationUnavailable, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import timedelta

    from atoll.clock import Clock
    from atoll.coordination.base import Heard, Resolution
    from atoll.settings import CoordinationSettings

KEPT = 60.0
"""Seconds that an approval outlives its time-out."""

V = TypeVar("V")


class Shelf(Generic[V]):
    """Values by key, each until its time is up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[V, float]] = {}

    def put(self, key: str, value: V, seconds: float) -> None:
        self._kept[key] = (value, self._clock.monotonic() + seconds)

    def get(self, key: str) -> V | None:
        value, until = self._kept.get(key, (None, 0.0))
        if value is None or self._clock.monotonic() < until:
            return value
        del self._kept[key]
        return None

    def left(self, key: str) -> float:
        """For how many seconds more."""
        return self._kept[key][1] - self._clock.monotonic() if self.get(key) is not None else 0.0

    def drop(self, key: str) -> None:
        self._kept.pop(key, None)

    def all(self) -> list[tuple[str, V]]:
        now = self._clock.monotonic()
        return [(key, value) for key, (value, until) in self._kept.items() if now < until]

    def sweep(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, (_, until) in self._kept.items() if until <= now]:
            del self._kept[key]


@dataclass(slots=True, eq=False)
class Place:
    """In the line for a lease."""

    holder: Holder
    bell: Bell = field(default_factory=Bell)


@dataclass(slots=True, eq=False)
class Approval:
    replica: str
    question: str
    deadline: float
    answer: str | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, answer: str | None) -> None:
        self.answer = answer
        self.settled.set()


class MemoryState:
    """What the replicas in one process share."""

    def __init__(self, clock: Clock) -> None:
        self.present: Shelf[bool] = Shelf(clock)
        self.leases: Shelf[Holder] = Shelf(clock)
        self.lines: dict[str, list[Place]] = {}
        self.windows: Shelf[str] = Shelf(clock)
        self.approvals: Shelf[Approval] = Shelf(clock)
        self.cancellations: Shelf[str] = Shelf(clock)
        self.messages: Shelf[list[str]] = Shelf(clock)
        self.listeners: dict[str, set[Bell]] = {}
        self.replicas: list[MemoryCoordination] = []

    def sweep(self) -> None:
        for shelf in (self.leases, self.windows, self.cancellations, self.messages):
            shelf.sweep()
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
        self.on_cancel: Callable[[str], None] = lambda _: None
        self.on_gap: Callable[[], None] = lambda: None
        self._settings = settings
        self._lease_ttl = settings.lease_ttl.total_seconds()
        self._presence_ttl = settings.presence_ttl.total_seconds()
        self._execution_ttl = execution_ttl
        self._clock = clock
        self._state = MemoryState(clock) if state is None else state
        self._ended = False

    def beside(self, replica: str) -> MemoryCoordination:
        """Another replica that shares what this one has."""
        return MemoryCoordination(
            replica, self._settings, self._execution_ttl, self._clock, state=self._state
        )

    async def open(self) -> None:
        self._ended = False
        if self not in self._state.replicas:
            self._state.replicas.append(self)
        await self.beat()

    async def close(self) -> None:
        if self in self._state.replicas:
            self._state.replicas.remove(self)

    # Presence

    async def beat(self) -> bool:
        if self._ended:
            return False
        self._state.sweep()
        present = self._state.present.get(self.replica) is not None
        self._state.present.put(self.replica, True, self._presence_ttl)
        return present

    async def alive(self, replica: str) -> bool:
        return self._state.present.get(replica) is not None

    def _lost(self, replica: str) -> bool:
        return replica != self.replica and self._state.present.get(replica) is None

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> Holder | None:
        me = Holder(self.replica, owner)
        holder = self._take(key, me)
        if holder is None or wait <= 0:
            return holder
        return await self._stand(key, me, wait)

    def _take(self, key: str, me: Holder) -> Holder | None:
        if self._ended:
            raise CoordinationUnavailable(
                "This replica is shutting down; send the request again.",
            )
        holder = self._state.leases.get(key)
        if holder is None or self._lost(holder.replica):
            first = self._first(key)
            if first is not None and first.holder != me:
                self._state.leases.drop(key)
                first.bell.ring()
                return first.holder
        elif holder != me:
            return holder
        self._state.leases.put(key, me, self._lease_ttl)
        return None

    async def _stand(self, key: str, me: Holder, wait: float) -> Holder | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        place = Place(me)
        try:
            while True:
                line = self._state.lines.setdefault(key, [])
                if place not in line:  # New, or passed over because this replica seemed lost.
                    line.append(place)
                # Expiry rings no bell.
                look = min(self._presence_ttl / 3, self._state.leases.left(key) or wait)
                await place.bell.wait(min(deadline - loop.time(), look))
                holder = self._take(key, me)
                if holder is None or loop.time() >= deadline:
                    return holder
        finally:
            self._leave(key, place)

    def _first(self, key: str) -> Place | None:
        line = self._state.lines.get(key)
        while line and self._lost(line[0].holder.replica):
            line.pop(0)
        return line[0] if line else None

    def _leave(self, key: str, place: Place) -> None:
        line = self._state.lines.get(key, [])
        if place in line:
            line.remove(place)
        if not line:
            self._state.lines.pop(key, None)
        self._call_first(key)

    def _call_first(self, key: str) -> None:
        first = self._first(key)
        if first is not None and self._state.leases.get(key) is None:
            first.bell.ring()

    async def renew(self, key: str, owner: str) -> bool:
        me = Holder(self.replica, owner)
        if self._state.leases.get(key) != me:
            return False
        self._state.leases.put(key, me, self._lease_ttl)
        return True

    async def release(self, key: str, owner: str) -> None:
        if self._state.leases.get(key) == Holder(self.replica, owner):
            self._state.leases.drop(key)
            self._call_first(key)

    async def holder(self, key: str) -> Holder | None:
        return self._state.leases.get(key)

    # The interactive window

    async def open_window(self, session_id: str, execution_id: str) -> None:
        self._state.windows.put(session_id, execution_id, self._lease_ttl)

    async def close_window(self, session_id: str, execution_id: str) -> None:
        if self._state.windows.get(session_id) == execution_id:
            self._state.windows.drop(session_id)

    async def window(self, session_id: str) -> str | None:
        return self._state.windows.get(session_id)

    # Approvals

    async def ask(
        self, execution_id: str, question: dict[str, Any], *, timeout: float
    ) -> dict[str, Any] | None:
        approval = Approval(self.replica, packed(question), self._clock.monotonic() + timeout)
        if self._ended:
            return dict(SHUTDOWN)
        former = self._state.approvals.get(execution_id)
        if former is not None and former.answer is None:
            former.settle(None)
        elif (
            former is not None
            and former.answer not in (None, packed(SHUTDOWN))
            and former.question == approval.question
            and former.replica != self.replica
        ):
            # Answered to a replica that was lost before it passed that on.
            approval.settle(former.answer)
        self._state.approvals.put(execution_id, approval, timeout + KEPT)
        if self._state.cancellations.get(execution_id) is not None:
            approval.settle(packed(CANCELLED))
        try:
            async with asyncio.timeout(timeout):
                await approval.settled.wait()
        except TimeoutError:
            pass
        finally:
            if approval.answer is None and self._state.approvals.get(execution_id) is approval:
                self._state.approvals.drop(execution_id)
        return None if approval.answer is None else unpacked(approval.answer)

    def _pending(self, execution_id: str) -> Approval | None:
        approval = self._state.approvals.get(execution_id)
        if (
            approval is None
            or approval.answer is not None
            or approval.deadline <= self._clock.monotonic()
            or self._lost(approval.replica)
        ):
            return None
        return approval

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        pending = self._pending(execution_id)
        return None if pending is None else unpacked(pending.question)

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], *, question: dict[str, Any] | None = None
    ) -> Resolution:
        text = packed(answer)
        pending = self._pending(execution_id)
        if pending is not None:
            if question is not None and pending.question != packed(question):
                return "gone"
            pending.settle(text)
            return "resolved"
        approval = self._state.approvals.get(execution_id)
        if approval is None or approval.answer is None or self._lost(approval.replica):
            return "gone"
        if question is not None and approval.question != packed(question):
            return "gone"
        return "already"

    # Cancellation

    async def cancel(self, execution_id: str, reason: str) -> None:
        if self._state.cancellations.get(execution_id) is None:
            self._state.cancellations.put(execution_id, reason, self._execution_ttl.total_seconds())
        approval = self._state.approvals.get(execution_id)
        if approval is not None and approval.answer is None:
            approval.settle(packed(CANCELLED))
        loop = asyncio.get_running_loop()
        for replica in self._state.replicas:
            loop.call_soon(replica.on_cancel, execution_id)

    async def cancelled(self, execution_id: str) -> str | None:
        return self._state.cancellations.get(execution_id)

    # Messages

    async def push(self, execution_id: str, message: str) -> None:
        messages = self._state.messages.get(execution_id) or []
        if len(messages) >= MAX_MESSAGES:
            raise TemporaryError(
                f"{MAX_MESSAGES} messages wait for {execution_id}; send this one once it has read"
                " them.",
                code="queue_full",
            )
        messages.append(checked(message))
        self._state.messages.put(execution_id, messages, self._execution_ttl.total_seconds())

    async def drain(self, execution_id: str) -> list[str]:
        messages = self._state.messages.get(execution_id) or []
        self._state.messages.drop(execution_id)
        return messages

    # Telling others

    async def tell(self, topic: str) -> None:
        for bell in self._state.listeners.get(topic, ()):
            bell.ring()

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Heard]:
        bell = Bell()
        self._state.listeners.setdefault(topic, set()).add(bell)
        try:
            yield bell
        finally:
            self._state.listeners[topic].discard(bell)
            if not self._state.listeners[topic]:
                del self._state.listeners[topic]

    # The end

    async def clean(self, session_id: str, execution_id: str) -> None:
        holder = self._state.leases.get(session_id)
        if holder is not None and holder.owner == execution_id:
            self._state.leases.drop(session_id)
            self._call_first(session_id)
        await self.close_window(session_id, execution_id)
        approval = self._state.approvals.get(execution_id)
        if approval is not None and approval.answer is None:
            approval.settle(None)
        self._state.approvals.drop(execution_id)
        self._state.cancellations.drop(execution_id)
        self._state.messages.drop(execution_id)

    async def shutdown(self) -> None:
        self._ended = True
        for _, approval in self._state.approvals.all():
            if approval.replica == self.replica and approval.answer is None:
                approval.settle(packed(SHUTDOWN))
        for key, holder in self._state.leases.all():
            if holder.replica == self.replica:
                await self.release(key, holder.owner)
        for line in self._state.lines.values():
            for place in line:
                if place.holder.replica == self.replica:
                    place.bell.ring()
        self._state.present.drop(self.replica)
