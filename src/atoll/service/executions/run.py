"""Executions under way: what is heard of them, who hears it, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

from atoll.link.output import Intake, RunLimits
from atoll.model.execution import Execution, ExecutionStatus
from atoll.model.stream_event import StreamEvent
from atoll.protocol import frames
from atoll.service.executions import event_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.model.execution import Outcome
    from atoll.model.session import Session
    from atoll.settings import ExecutionSettings

RING_EVENTS = 8192
"""The most events that are kept of a terminal, however small they are."""

MAX_ARTIFACTS = 1000
"""Artifacts that are listed for one execution; the rest is counted."""
MAX_RESULTS_SIZE = 8 * 1024 * 1024
"""Bytes kept of the results that a context displays in one execution; the rest is dropped."""


class Run:
    """An execution under way: what is known of it so far, and who wants to know."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
        self.events: list[StreamEvent] = []
        """In order; bounded by the output limit, and on a terminal by `ring`."""
        self.forgotten = 0
        """How many events have left at the front."""
        self.ring: int | None = None
        """How many bytes of a terminal's output are kept."""
        self.sequence = 0
        """The last entry of the executor's log that was heard."""
        self.log: list[tuple[int, int]] = []
        """Channel and length of each entry of this attempt."""
        self.changed = asyncio.Event()
        self.beats = 0
        """Heartbeats that were heard."""
        self.value = bytearray()
        self.lines = bytearray()
        """Questions and displays of this attempt, as they came."""
        self.on_question: Callable[[dict[str, Any]], None] = lambda line: None
        """Told of each question, and of what became of it."""
        self.turn: asyncio.Future[bool] | None = None
        """Whether it may run now; set to False when it is not to run at all."""
        self.queue: SlotQueue | None = None
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = False
        self.reason: str | None = None
        """Why it was cancelled, in the words of who did."""
        self.stopping = asyncio.Event()
        """Set when it was ended from outside."""
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
        self.noting: asyncio.Task[None] | None = None
        """Who writes into its record that it runs."""
        self._started = False
        self._intake: Intake | None = None
        self._partial = event_log.LineBuffer()
        self._size = 0
        self._gone = 0
        """How many items of `log` are before the first output that is kept."""

    @property
    def stopped(self) -> bool:
        """Whether it was ended from outside: cancelled, or its session ended."""
        return self.cancelled or self.ended_by is not None

    @property
    def told(self) -> int:
        """How many events there were."""
        return self.forgotten + len(self.events)

    @property
    def ahead(self) -> int | None:
        """How many are before it; none when it waits for nobody."""
        if self.turn is None or self.queue is None or self.execution.started_at is not None:
            return None
        if not self.turn.done():
            return self.queue.ahead(self.turn)
        return 1 if self.in_line else None

    # What is heard of it

    def bounded(self, settings: ExecutionSettings, *, requested: bool) -> Intake:
        """
        What bounds the output of this attempt, by whichever links it comes; `requested` when this
        process requests the run.
        """
        terminal = self.execution.request.terminal is not None
        if terminal:
            # What is kept here of it is what the executor keeps.
            self.ring = settings.output_limit
        if self._intake is None:
            limits = RunLimits(
                output=settings.output_limit,
                value=settings.return_limit,
                results=MAX_RESULTS_SIZE,
                artifacts=MAX_ARTIFACTS,
                terminal=terminal,
            )
            self._intake = Intake(limits, requested=requested)
        return self._intake

    def started(self) -> None:
        if not self._started:
            # Its record may say so already.
            self._started = True
            self.execution = dataclasses.replace(self.execution, status=ExecutionStatus.RUNNING)
            attempt = self.execution.retry_count
            self._tell(event_log.number(attempt, 1), "started", {"attempt": attempt + 1})

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        if sequence - self.sequence > 1:
            self.log.append((event_log.GAP, sequence - self.sequence - 1))
        self.sequence = sequence
        self.log.append((channel, len(data)))
        here = event_log.of_entry(self.execution.retry_count, sequence)
        if channel == frames.VALUE:
            self.value += data
        elif channel in event_log.OUTPUTS:
            self._size += len(data)
            self._tell(here, event_log.OUTPUTS[channel], data)
            self._forget()
        elif channel in event_log.LINES:
            self.lines += data
            for said in self._partial.feed(data):
                line = event_log.told_of(channel, said)
                if line is None:
                    continue
                self._tell(here, event_log.LINES[channel], line)
                if channel == frames.APPROVAL:
                    self.on_question(line)

    def heartbeat(self) -> None:
        self.beats += 1
        self.changed.set()

    def _tell(self, number: int, name: str, content: bytes | dict[str, Any]) -> None:
        self.events.append(StreamEvent(number, name, content))
        self.changed.set()

    def _forget(self) -> None:
        while self.ring is not None and (
            (self._size > self.ring and len(self.events) > 1) or len(self.events) > RING_EVENTS
        ):
            event = self.events.pop(0)
            self.forgotten += 1
            if isinstance(event.content, bytes):
                self._size -= len(event.content)
                if (event.number or 0) >= event_log.number(self.execution.retry_count, 0):
                    self._forget_entry()

    def _forget_entry(self) -> None:
        """The first entry of the log whose output is still kept becomes part of a gap."""
        place = self._gone
        while self.log[place][0] not in event_log.OUTPUTS:
            place += 1
        if place and self.log[place - 1][0] == event_log.GAP:
            self.log[place - 1] = (event_log.GAP, self.log[place - 1][1] + 1)
            del self.log[place]
            self._gone = place
        else:
            self.log[place] = (event_log.GAP, 1)
            self._gone = place + 1

    def gathered(self, name: str) -> bytes:
        """Output of this attempt."""
        first = event_log.number(self.execution.retry_count, 0)
        return b"".join(
            event.content
            for event in self.events
            if event.name == name
            and isinstance(event.content, bytes)
            and (event.number or 0) >= first
        )

    def with_log(self, outcome: Outcome) -> Outcome:
        """The outcome with what was heard besides output, and in what order."""
        lines = bytes(self.lines) or None
        return dataclasses.replace(outcome, log=tuple(self.log), results_json=lines)

    def next_attempt(self, execution: Execution, **told: Any) -> None:
        """The attempt is lost and there is another; what the lost one wrote is not its result."""
        self.execution = execution
        self._started = False
        self.sequence = 0
        self._intake = None
        self.log, self.value, self.lines = [], bytearray(), bytearray()
        self._gone = 0
        self._partial = event_log.LineBuffer()
        attempt = execution.retry_count
        self._tell(event_log.number(attempt, 0), "retry", {"attempt": attempt + 1, **told})

    def complete(self, ended: Execution) -> None:
        """Tell what the record has beyond what was heard."""
        last = max((event.number or 0 for event in self.events), default=0)
        for event in event_log.replay(ended):
            if (event.number or 0) > last and event.name != "result":
                self.events.append(event)
        self.changed.set()

    def give_up_turn(self) -> None:
        """Stop waiting for the session to be free: this one is not going to run."""
        self.stopping.set()
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


class SlotQueue:
    """
    Who may run in a session now: as many as its capacity, in the order they joined.

    A turn is a future, True when it has come. Whoever holds one gives it to `leave` in the end,
    whether it came, was given up or was cancelled.
    """

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._slots: dict[asyncio.Future[bool], int] = {}
        self._told: dict[asyncio.Future[bool], Callable[[], None]] = {}
        self.coming = 0
        """How many are being recorded and will join."""
        self.waiting: deque[asyncio.Future[bool]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._slots)

    def join(self, told: Callable[[], None] | None = None) -> asyncio.Future[bool]:
        """A turn; `told` is called when one before it has left."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._free:
            self._slots[turn] = self._free.pop()
            turn.set_result(True)
        else:
            self.waiting.append(turn)
            if told is not None:
                self._told[turn] = told
        return turn

    def slot(self, turn: asyncio.Future[bool]) -> int:
        """Which of the session's places a turn that has come is for."""
        return self._slots[turn]

    def ahead(self, turn: asyncio.Future[bool]) -> int:
        """How many are before a turn that has not come."""
        with contextlib.suppress(ValueError):
            return len(self._slots) + self.waiting.index(turn)
        return 0

    def leave(self, turn: asyncio.Future[bool]) -> None:
        self._told.pop(turn, None)
        slot = self._slots.pop(turn, None)
        if slot is None:
            with contextlib.suppress(ValueError):  # Passed over already.
                self.waiting.remove(turn)
        else:
            self._pass_on(slot)
        for following in self.waiting:
            if following in self._told:
                self._told[following]()

    def _pass_on(self, slot: int) -> None:
        while self.waiting:
            following = self.waiting.popleft()
            if not following.done():
                self._told.pop(following, None)
                self._slots[following] = slot
                following.set_result(True)
                return
        self._free.append(slot)
