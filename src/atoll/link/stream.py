"""The state of one request on a link: its credit in both directions, its reader and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from atoll.link.credit import Rate, Window
from atoll.link.errors import ProtocolViolation
from atoll.protocol import frames

if TYPE_CHECKING:
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


@dataclass(frozen=True, slots=True)
class Reader:
    """Who receives what the executor sends before its answer."""

    carries: int = 0
    """The kind of frame in which it may send bytes, if any."""
    inbox: Inbox[Item] | None = None
    """For a reader that takes data, output and events at its own pace."""
    listener: RunListener | None = None
    intake: Intake | None = None


NO_READER = Reader()


class Stream:
    __slots__ = (
        "_drained",
        "_granted",
        "_sent",
        "carries",
        "credit",
        "done",
        "events",
        "inbox",
        "intake",
        "listener",
        "number",
        "op",
        "owed",
        "window",
    )

    def __init__(self, number: int, op: str, reader: Reader, *, sends: bool) -> None:
        """With `sends`, this side sends bytes."""
        self.number = number
        self.op = op
        self.done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.carries = reader.carries
        self.inbox = reader.inbox
        self.listener = reader.listener
        self.intake = reader.intake
        self.window = Window()
        self.events = Rate()
        self.owed = 0
        """Bytes received that the executor has not been credited for."""
        self.credit = frames.WINDOW
        """Bytes that this side may send."""
        self._sent = self._granted = 0
        """Bytes that this side has sent, and that the executor has credited."""
        self._drained = asyncio.Event() if sends else None
        """Set when there is credit."""

    def use_credit(self, size: int) -> int:
        """Returns how many of `size` bytes are to be sent now."""
        size = min(size, self.credit, frames.CHUNK)
        self.credit -= size
        self._sent += size
        return size

    def credited(self, count: int) -> None:
        """The executor has granted credit for more bytes."""
        if count == 0:
            self.events.count()
        self._granted += count
        if self._drained is None or self._granted > self._sent:
            raise ProtocolViolation("The executor credits bytes that it was not sent.")
        self.credit += count
        self._drained.set()

    async def wait_for_credit(self) -> None:
        """Wait until there is credit, or the executor has answered."""
        assert self._drained is not None
        while self.credit <= 0 and not self.done.done():
            self._drained.clear()
            await self._drained.wait()

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
        if self._drained is not None:
            self._drained.set()
