"""Executions under way: what is heard of them, who hears it, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

from atoll.executor import frames
from atoll.model.execution import Execution, ExecutionStatus

if TYPE_CHECKING:
    from atoll.model.session import Session


MERGED = 64 * 1024


class Running:
    """An execution under way: what is known of it so far, and who wants to know."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
        self.events: list[tuple[str, bytearray]] = []
        """Name and content, in order; bounded by the output limit."""
        self.listeners = 0
        """Who follows the events. While nobody does, output in small pieces is put together."""
        self.sequence = 0
        """The last output that was heard."""
        self.changed = asyncio.Event()
        self.value = bytearray()
        self.turn: asyncio.Future[bool] | None = None
        """Whether it may run now; set to False when it is not to run at all."""
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = False
        self.ended_by: Session | None = None
        self.adopted = False
        """Whether it was taken over from a replica that was lost."""
        self.may_have_begun = False
        """Whether it may have begun already: by that replica, or in an earlier attempt."""
        self.losses = 0
        """How often this replica had been lost when it was started."""
        self.in_line = False
        """Whether it waits for other replicas to be done with its session."""
        self.called_out = False
        """Whether it was called out of that line, by a cancellation of its task."""

    @property
    def stopped(self) -> bool:
        """Whether it was ended from outside: cancelled, or its session ended."""
        return self.cancelled or self.ended_by is not None

    def started(self) -> None:
        if self.execution.status is ExecutionStatus.PENDING:
            self.execution = dataclasses.replace(self.execution, status=ExecutionStatus.RUNNING)
            self.tell("started", b"")

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.sequence = sequence
        if channel == frames.VALUE:
            self.value += data
        else:
            self.tell("stdout" if channel == frames.STDOUT else "stderr", data)

    def heartbeat(self) -> None: ...

    def tell(self, name: str, data: bytes) -> None:
        last = self.events[-1] if self.events else ("", bytearray())
        if not self.listeners and last[0] == name and len(last[1]) < MERGED:
            last[1].extend(data)
        else:
            self.events.append((name, bytearray(data)))
        self.changed.set()

    def gathered(self, name: str) -> bytes:
        return b"".join(data for kind, data in self.events if kind == name)

    def complete(self, ended: Execution) -> None:
        """Tell what the record has beyond what was heard."""
        if ended.outcome is not None:
            outputs = (("stdout", ended.outcome.stdout), ("stderr", ended.outcome.stderr))
            for name, whole in outputs:
                rest = whole[len(self.gathered(name)) :]
                if rest:
                    self.tell(name, rest)

    def give_up_turn(self) -> None:
        """Stop waiting for the session to be free: this one is not going to run."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(False)
        if self.in_line and self.task is not None:
            self.in_line = False
            self.called_out = True
            self.task.cancel()

    def finish(self, execution: Execution) -> None:
        self.execution = execution
        if not self.done.done():
            self.done.set_result(execution)
        self.changed.set()


class Queue:
    """
    Who may run in a session now: one at a time, in the order they joined.

    A turn is a future, True when it has come. Whoever holds one gives it to `leave` in the end,
    whether it came, was given up or was cancelled.
    """

    def __init__(self) -> None:
        self.busy = False
        self.coming = 0
        """How many are being recorded and will join."""
        self.waiting: deque[asyncio.Future[bool]] = deque()

    def join(self) -> asyncio.Future[bool]:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.busy:
            self.waiting.append(turn)
        else:
            self.busy = True
            turn.set_result(True)
        return turn

    def leave(self, turn: asyncio.Future[bool]) -> None:
        if not turn.done() or turn.cancelled() or not turn.result():
            with contextlib.suppress(ValueError):  # Passed over already.
                self.waiting.remove(turn)
            return
        while self.waiting:
            following = self.waiting.popleft()
            if not following.done():
                following.set_result(True)
                return
        self.busy = False


class Heard:
    """
    How much of an execution's events somebody has heard, as a number that grows with each event.

    The number says how many bytes of either output were told. So one who comes back is told exactly
    the rest, even when only the record is left, which does not know in what pieces output came.
    """

    _BITS = 40

    def __init__(self, number: int = 0) -> None:
        steps, stdout = number >> self._BITS, number & ((1 << self._BITS) - 1)
        self._started = steps > 0
        total = max(0, steps - 1)
        self._bytes = {"stdout": min(stdout, total), "stderr": total - min(stdout, total)}
        self._skip = dict(self._bytes)

    def _number(self, more: int = 0) -> int:
        return (sum(self._bytes.values()) + 1 + more << self._BITS) + self._bytes["stdout"]

    def hear(self, name: str, data: bytes) -> tuple[int, str, bytes] | None:
        """The event as it is to be told, in the order that events come; none when it was heard."""
        if name == "started":
            known, self._started = self._started, True
            return None if known else (self._number(), name, data)
        skipped = min(self._skip[name], len(data))
        self._skip[name] -= skipped
        if skipped == len(data):
            return None
        self._bytes[name] += len(data) - skipped
        return self._number(), name, data[skipped:]

    def end(self) -> int:
        """The number of the last event."""
        return self._number(1)
