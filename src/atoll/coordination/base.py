"""
The contract for what running replicas share: which replica acts on what, and which task waits for
which.

Nothing here is durable: all of it may be lost at any moment (a restart of the back-end, an expiry),
and the store remains the source of truth. What a lease protects must therefore also be protected by
compare-and-set in the store; a lease only keeps two replicas from doing the same work at once.

A replica is alive as long as it sends heartbeats: it is lost `presence_ttl` after its last one.
Every lease is held by an owner on a replica. A lease ends when it is released, when it was not
renewed for `lease_ttl`, or as soon as another replica asks for it after its holder's replica was
lost. An owner that acquires its own lease again renews it. Waiters get a lease in the order in
which they asked, on whichever replica they are; waiters of a lost replica lose their turn.

Every method is safe to call twice and may be cancelled at any await; a cancelled wait leaves
neither a lease nor a waiter behind. If the back-end cannot be reached, every method, waits
included, raises `CoordinationUnavailable` in bounded time. Everything expires: leases after
`lease_ttl`, approvals a minute after their time-out, cancellations after `execution_ttl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

Resolution = Literal["resolved", "already", "gone"]

CANCELLED = {"approved": False, "reason": "cancelled"}
SHUTDOWN = {"approved": False, "reason": "shutdown"}

MAX_PAYLOAD_SIZE = 65_536
"""Bytes of one question or answer; a longer one is refused with `TooLarge`."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    replica: str
    owner: str
    """Often an execution's id."""


class Subscription(Protocol):
    """Receives the notifications of one topic."""

    async def wait(self, timeout: float) -> bool:
        """
        Wait at most `timeout` seconds for a notification; true if there was one since the
        subscription began, or since the last wait that returned true. A lost connection counts as
        a notification, because one may have been missed: the caller must read the state itself.
        """


class CoordinationObserver(Protocol):
    """Called on the event loop, one call after the other."""

    def cancellation_requested(self, execution_id: str) -> None:
        """Some replica was asked to cancel the execution."""

    def coordination_restored(self) -> None:
        """
        The back-end was unavailable and is available again. Cancellations may have been missed:
        read `cancelled`.
        """


class Coordination(Protocol):
    replica: str
    """The id of this replica: of this start of it."""

    def subscribe(self, observer: CoordinationObserver) -> None: ...

    async def open(self) -> None:
        """Connect and send the first heartbeat."""

    async def close(self) -> None:
        """Close the connections. Leases stay held; `shutdown` releases them."""

    # Presence

    async def heartbeat(self) -> bool:
        """
        Announce that this replica is alive, for `presence_ttl` from when this was called. False if
        this replica was considered lost in between; other replicas may hold its leases now.
        """

    async def alive(self, replica: str) -> bool: ...

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> LeaseHolder | None:
        """
        Take the lease of `key`: None if `owner` has it now, otherwise its holder. With `wait`, wait
        for it for at most so many seconds. A free lease with waiters belongs to the first of them;
        a caller that does not wait gets that waiter as the holder.
        """

    async def renew(self, key: str, owner: str) -> bool:
        """Hold it for `lease_ttl` from now on; false if `owner` does not hold it any more."""

    async def release(self, key: str, owner: str, *, topic: str | None = None) -> None:
        """
        Release it to the first waiter, if `owner` holds it. Then notify `topic`, if it is given, as
        `notify` does.
        """

    # Approvals

    async def ask(
        self, execution_id: str, question: dict[str, Any], *, timeout: float
    ) -> dict[str, Any] | None:
        """
        Ask a person and wait for the answer; None after `timeout` seconds without one. `CANCELLED`
        if the execution is cancelled, `SHUTDOWN` if this replica shuts down. An answer that is
        given while the question is being stored is not missed, nor one that was given to the same
        question of a lost replica.
        """

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        """The question that an execution waits for an answer to."""

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], *, question: dict[str, Any] | None = None
    ) -> Resolution:
        """
        Answer: `resolved` if this is the answer that counts, `already` if there was one before,
        `gone` if no question is open any more. Of two answers at once, one is `resolved`. A later
        question of an execution replaces an earlier one, whose `ask` returns None; with `question`,
        as `question()` returned it, the answer counts for that question only.
        """

    # Cancellation

    async def cancel(self, execution_id: str, reason: str) -> None:
        """Request that an execution ends. Its open question is answered with `CANCELLED`."""

    async def cancelled(self, execution_id: str) -> str | None:
        """The reason of the first request, if there was one."""

    # Notifications

    async def notify(self, topic: str) -> None:
        """Wake all current subscriptions of the topic, on every replica."""

    def listen(self, topic: str) -> AbstractAsyncContextManager[Subscription]:
        """Receives every notification between entering and leaving."""

    # The end

    async def shutdown(self) -> None:
        """
        Answer the questions asked by this replica with `SHUTDOWN`, release all its leases, and
        withdraw its presence, so that others need not wait for an expiry. Pending and later
        `acquire` calls on this replica raise `TemporaryError`. Never fails: what cannot be released
        expires.
        """
