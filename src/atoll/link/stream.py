"""The state of one request on a link: its credit, the received data, and the waiting reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from atoll.link.credit import Rate, Window
from atoll.protocol import frames

if TYPE_CHECKING:
    import asyncio

    from atoll.link.credit import Inbox
    from atoll.link.output import Intake


class RunListener(Protocol):
    """Receives the events of a run. Called from the event loop; must not block."""

    def started(self) -> None: ...
    def output(self, sequence: int, channel: int, data: bytes) -> None: ...
    def heartbeat(self) -> None: ...


class Piece(NamedTuple):
    """A piece of a run's output."""

    sequence: int
    channel: int
    data: bytes


Item = bytes | Piece | dict[str, Any]
"""What an inbox holds: data of a file, output of a run, or an event."""


class Stream:
    __slots__ = (
        "carries",
        "credit",
        "done",
        "drained",
        "events",
        "granted",
        "inbox",
        "intake",
        "listener",
        "number",
        "op",
        "owed",
        "sent",
        "window",
    )

    def __init__(self, number: int, op: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.op = op
        self.done: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.carries = 0
        """The kind of frame in which the executor may send bytes, if any."""
        self.inbox: Inbox[Item] | None = None
        self.listener: RunListener | None = None
        self.intake: Intake | None = None
        self.window = Window()
        self.events = Rate()
        self.owed = 0
        """Bytes received that the executor has not been credited for."""
        self.drained: asyncio.Event | None = None
        """Set when there is credit; only where this side sends bytes."""
        self.credit = frames.WINDOW
        self.sent = self.granted = 0
        """Bytes that this side has sent, and that the executor has credited."""

    def finish(self, value: dict[str, Any]) -> None:
        if not self.done.done():
            self.done.set_result(value)
        self._wake_readers()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # Retrieved: a reader that left early is not a warning.
        self._wake_readers()

    def _wake_readers(self) -> None:
        if self.inbox is not None:
            self.inbox.end()
        if self.drained is not None:
            self.drained.set()
