"""
What the replicas of a control plane agree on while they run: who acts on what, who waits for whom.

Nothing here is a record: all of it may be lost at any moment (a restart of the back-end, an expiry)
and the store still holds the truth. What a lease protects must therefore also be protected by
compare-and-set in the store; a lease only keeps two replicas from doing the same work at once.

A replica is alive as long as it beats: it is lost `presence_ttl` after its last beat. Every lease
is held by an owner of a replica. A lease ends when it is released, when it was not renewed for
`lease_ttl`, or as soon as another replica asks for it after its holder's was lost. The same owner
may acquire a lease again; that renews it. Those who wait for a lease get it in the order in which
they came, whichever replica they are of; one whose replica is lost loses its place.

Every method is safe to call twice and may be cancelled at any await; a cancelled wait leaves
neither a lease nor a place in the line behind. A back-end that cannot be reached raises
`TemporaryError` with code `coordination_unavailable`, in bounded time, also to those who wait.
Everything expires by itself: leases and the window after `lease_ttl`, approvals a minute after
their time-out, cancellations and messages after `execution_ttl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

Resolution = Literal["resolved", "already", "gone"]

CANCELLED = {"approved": False, "reason": "cancelled"}
SHUTDOWN = {"approved": False, "reason": "shutdown"}

MAX_MESSAGES = 1000
"""Messages that wait for one execution; one more is refused."""
MAX_MESSAGE = 65_536
"""Bytes of one message, of a question and of an answer; more are `TooLarge`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lease: an owner (often an execution's id) of a replica."""

    replica: str
    owner: str


class Heard(Protocol):
    """One who listens for a topic."""

    async def wait(self, timeout: float) -> bool:
        """
        Whether something was told since listening began, or since the last wait that said so;
        waits at most so many seconds for it. A lost connection counts as told, because something
        may have been missed: who is woken looks for itself.
        """


class Coordination(Protocol):
    replica: str
    """The id of this replica, of this start of it."""
    on_cancel: Callable[[str], None]
    """Called on the loop with the id of each execution that any replica asks to cancel."""
    on_gap: Callable[[], None]
    """Called on the loop when cancellations may have been missed: who cares asks `cancelled`."""

    async def open(self) -> None:
        """Connect and beat for the first time."""

    async def close(self) -> None:
        """Let go of the connections. What is held stays held; `shutdown` gives it back."""

    # Presence

    async def beat(self) -> bool:
        """
        Say that this replica is alive, for `presence_ttl` from when this was called. False when it
        had been lost in between: others may hold what it held.
        """

    async def alive(self, replica: str) -> bool: ...

    # Leases

    async def acquire(self, key: str, owner: str, *, wait: float = 0.0) -> Holder | None:
        """
        Take the lease of `key`; None when `owner` has it now, otherwise who has it. With `wait`,
        stand in line for it for at most so many seconds. A free lease with others in line is
        theirs: one who does not wait is then told the first of them as the holder.
        """

    async def renew(self, key: str, owner: str) -> bool:
        """Hold it for `lease_ttl` from now on; False when it is no longer `owner`'s."""

    async def release(self, key: str, owner: str) -> None:
        """Give it back, to the first in line; nothing happens when it is not `owner`'s."""

    async def holder(self, key: str) -> Holder | None: ...

    # The interactive window: while an execution can hear messages and cancellations

    async def open_window(self, session_id: str, execution_id: str) -> None:
        """Opening it again renews it."""

    async def close_window(self, session_id: str, execution_id: str) -> None:
        """Nothing happens when another execution has opened it meanwhile."""

    async def window(self, session_id: str) -> str | None:
        """The execution that has the window open."""

    # Approvals

    async def ask(
        self, execution_id: str, question: dict[str, Any], *, timeout: float
    ) -> dict[str, Any] | None:
        """
        Put a question to a person and wait for the answer; None after `timeout` seconds without
        one. `CANCELLED` when the execution is cancelled, `SHUTDOWN` when this replica shuts down.
        An answer that comes while the question is being put is not missed, nor one that was given
        to the same question of a replica that is lost.
        """

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        """What an execution waits to be told."""

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], *, question: dict[str, Any] | None = None
    ) -> Resolution:
        """
        Answer: `resolved` when this is the answer that counts, `already` when there was one before,
        `gone` when nobody asks or waits any more. Of two at once, one is `resolved`. A later
        question of an execution takes the place of an earlier one, whose asker is told None; with
        `question`, as `question()` told it, the answer counts for that one alone.
        """

    # Cancellation

    async def cancel(self, execution_id: str, reason: str) -> None:
        """Ask for an execution's end. Its question is answered with `CANCELLED`."""

    async def cancelled(self, execution_id: str) -> str | None:
        """The reason of the first request, if there was one."""

    # Messages to an execution

    async def push(self, execution_id: str, message: str) -> None:
        """`TemporaryError` with code `queue_full` beyond `MAX_MESSAGES`."""

    async def drain(self, execution_id: str) -> list[str]:
        """All of them in order; each is given out once."""

    # Telling others

    async def tell(self, topic: str) -> None:
        """Wake those who listen for it now, on every replica."""

    def listen(self, topic: str) -> AbstractAsyncContextManager[Heard]:
        """What is told between entering and leaving is heard."""

    # The end

    async def clean(self, session_id: str, execution_id: str) -> None:
        """
        Forget an execution: its lease on the session, window, question, cancellation, messages.
        """

    async def shutdown(self) -> None:
        """
        Answer the questions asked from here with `SHUTDOWN`, give back all leases of this replica,
        and be present no more, so that others need not wait for an expiry. Who waits for a lease
        here or asks for one later gets `TemporaryError`. Does not fail: what a back-end that cannot
        be reached still holds expires.
        """
