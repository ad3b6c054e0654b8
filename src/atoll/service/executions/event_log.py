"""
Event log of an execution: numbers events so that a client can resume a stream after a disconnect
without gaps or repeats.

A number identifies the attempt of an event, and its place in the executor's log. So this
replica, another one, and the stored record all give an event the same number. Within an attempt, 0
is the announcement of the retry, 1 the start, an entry of the executor's log has its sequence
number plus one, and the result has the last number. Events that describe a momentary state (the
position in the queue, a heartbeat) have no number and are not replayed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from atoll.link.messages import approval
from atoll.link.output import Intake, RunLimits
from atoll.link.values import is_within, strict_json
from atoll.model.json_size import count_values
from atoll.model.stream_event import StreamEvent
from atoll.protocol import frames
from atoll.service.executions.mime import DEPTH, VALUES, shaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.model.execution import Execution, Outcome
    from atoll.settings import ExecutionSettings

ATTEMPT_BITS = 32
GAP = 0
"""A channel in the log of a record: a number of entries that are not kept."""
OUTPUTS = {frames.STDOUT: "stdout", frames.STDERR: "stderr"}
LINES = {frames.APPROVAL: "approval", frames.DISPLAY: "display"}
"""Channels of JSON lines, and the names of their events."""


def number(retry_count: int, place: int) -> int:
    return (retry_count << ATTEMPT_BITS) + place


def of_entry(retry_count: int, sequence: int) -> int:
    return number(retry_count, sequence + 1)


def of_result(retry_count: int) -> int:
    """
    After everything that the attempt can have sent: a replica that was lost together with the
    instance may have passed on output that no record has.
    """
    return number(retry_count + 1, 0) - 1


class LineBuffer:
    """
    Parses JSON lines that arrive in pieces. User code can write them: lines that are not JSON
    objects are dropped, and so are lines beyond the number of values that one execution may have.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._room = VALUES

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._pending += data
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            count = count_values(line, VALUES)
            if count > self._room:
                continue
            self._room -= count
            try:
                value = strict_json(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def event_of(channel: int, line: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a line's event; null if the line does not belong on its channel."""
    if channel == frames.DISPLAY:
        return shaped(line)
    return approval(line) if is_within(line, DEPTH) else None


def lines_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Questions and displays, in order."""
    return list(LineBuffer().feed(outcome.results_json or b""))


def replay(execution: Execution) -> Iterator[StreamEvent]:
    """The events of an ended execution, from its record."""
    outcome, attempt = execution.outcome, execution.retry_count
    if outcome is None:
        return
    if attempt:
        lost = execution.attempts[attempt - 1] if len(execution.attempts) >= attempt else None
        cause = None if lost is None else lost.cause
        yield StreamEvent(number(attempt, 0), "retry", {"attempt": attempt + 1, "cause": cause})
    yield StreamEvent(number(attempt, 1), "started", {"attempt": attempt + 1})
    yield from _entries(outcome, attempt)
    yield StreamEvent(of_result(attempt), "result", execution)


def _entries(outcome: Outcome, attempt: int) -> Iterator[StreamEvent]:
    output = {"stdout": outcome.stdout, "stderr": outcome.stderr}
    log = outcome.log
    if log is None:
        log = ((frames.STDOUT, len(outcome.stdout)), (frames.STDERR, len(outcome.stderr)))
    read, lines, read_lines = dict.fromkeys(output, 0), LineBuffer(), 0
    line_bytes = outcome.results_json or b""
    sequence = 0
    for channel, size in log:
        sequence += size if channel == GAP else 1
        here = of_entry(attempt, sequence)
        if channel in OUTPUTS:
            name = OUTPUTS[channel]
            piece = output[name][read[name] : read[name] + size]
            read[name] += size
            if piece:
                yield StreamEvent(here, name, piece)
        elif channel in LINES:
            for line in lines.feed(line_bytes[read_lines : read_lines + size]):
                if (content := event_of(channel, line)) is not None:
                    yield StreamEvent(here, LINES[channel], content)
            read_lines += size


MAX_RING_EVENTS = 8192
"""Events of a terminal that are kept, however small they are."""
MAX_ARTIFACTS = 1000
"""Artifacts that are listed for one execution; the rest is counted."""
MAX_RESULTS_SIZE = 8 * 1024 * 1024
"""Bytes kept of the results that a context displays in one execution; the rest is dropped."""


class EventLog:
    """
    Events of an execution that is under way, as its executor reports them. Memory is bounded by the
    output limit; of a terminal, only the last part is kept.
    """

    def __init__(self, execution: Execution, settings: ExecutionSettings) -> None:
        self._attempt = execution.retry_count
        self._terminal = execution.request.terminal is not None
        self._settings = settings
        self._events: list[StreamEvent] = []
        self._dropped = 0
        """Events that were dropped at the front."""
        self._size = 0
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.sequence = 0
        """The last entry of the executor's log that has arrived."""
        self._started = False
        self._entries: list[tuple[int, int]] = []
        """Channel and length of each entry of this attempt."""
        self._dropped_entries = 0
        """Items of `_entries` before the first output that is kept."""
        self._value = bytearray()
        self._lines = bytearray()
        self._line_buffer = LineBuffer()
        self._intake: Intake | None = None

    def intake(self, *, requested: bool) -> Intake:
        """
        Bounds the output of this attempt, over all links that it arrives by; `requested` if this
        process has sent the run request.
        """
        if self._intake is None:
            limits = RunLimits(
                output=self._settings.output_limit,
                value=self._settings.return_limit,
                results=MAX_RESULTS_SIZE,
                artifacts=MAX_ARTIFACTS,
                terminal=self._terminal,
            )
            self._intake = Intake(limits, requested=requested)
        return self._intake

    # What arrives

    def started(self) -> bool:
        """Whether this is the first report that the attempt has started."""
        if self._started:
            return False
        self._started = True
        self._add(number(self._attempt, 1), "started", {"attempt": self._attempt + 1})
        return True

    def append(self, sequence: int, channel: int, data: bytes) -> list[dict[str, Any]]:
        """Add an entry of the executor's log; the questions in it are returned."""
        if sequence - self.sequence > 1:
            self._entries.append((GAP, sequence - self.sequence - 1))
        self.sequence = sequence
        self._entries.append((channel, len(data)))
        here = of_entry(self._attempt, sequence)
        questions: list[dict[str, Any]] = []
        if channel == frames.VALUE:
            self._value += data
        elif channel in OUTPUTS:
            self._size += len(data)
            self._add(here, OUTPUTS[channel], data)
            if self._terminal:
                self._drop_old()
        elif channel in LINES:
            self._lines += data
            for line in self._line_buffer.feed(data):
                if (content := event_of(channel, line)) is not None:
                    self._add(here, LINES[channel], content)
                    if channel == frames.APPROVAL:
                        questions.append(content)
        return questions

    def next_attempt(self, attempt: int, details: dict[str, Any]) -> None:
        """Begin another attempt; output of the lost one is not part of the result."""
        self._attempt = attempt
        self._begin_attempt()
        self._add(number(attempt, 0), "retry", {"attempt": attempt + 1, **details})

    def complete(self, ended: Execution) -> None:
        """Add events that the record of the ended execution has and this log has not received."""
        last = max((event.number or 0 for event in self._events), default=0)
        for event in replay(ended):
            if (event.number or 0) > last and event.name != "result":
                self._events.append(event)

    def _add(self, event_number: int, name: str, content: bytes | dict[str, Any]) -> None:
        self._events.append(StreamEvent(event_number, name, content))

    def _drop_old(self) -> None:
        while (self._size > self._settings.output_limit and len(self._events) > 1) or len(
            self._events
        ) > MAX_RING_EVENTS:
            event = self._events.pop(0)
            self._dropped += 1
            if isinstance(event.content, bytes):
                self._size -= len(event.content)
                if (event.number or 0) >= number(self._attempt, 0):
                    self._drop_entry()

    def _drop_entry(self) -> None:
        """The first entry whose output is still kept becomes part of a gap."""
        place = self._dropped_entries
        while self._entries[place][0] not in OUTPUTS:
            place += 1
        if place and self._entries[place - 1][0] == GAP:
            self._entries[place - 1] = (GAP, self._entries[place - 1][1] + 1)
            del self._entries[place]
            self._dropped_entries = place
        else:
            self._entries[place] = (GAP, 1)
            self._dropped_entries = place + 1

    # What is known

    @property
    def end(self) -> int:
        """Number of events so far, including dropped ones."""
        return self._dropped + len(self._events)

    def since(self, position: int) -> tuple[int, list[StreamEvent]]:
        """The events from a position on, and the position of the first that is still kept."""
        position = max(position, self._dropped)
        return position, self._events[position - self._dropped :]

    def output(self, name: str) -> bytes:
        """stdout or stderr of this attempt."""
        first = number(self._attempt, 0)
        return b"".join(
            event.content
            for event in self._events
            if event.name == name
            and isinstance(event.content, bytes)
            and (event.number or 0) >= first
        )

    @property
    def value(self) -> bytes:
        """The return value of this attempt as it arrived, or the error in its place."""
        return bytes(self._value)

    def with_log(self, outcome: Outcome) -> Outcome:
        """The outcome with questions and displays, and with the order of all entries."""
        lines = bytes(self._lines) or None
        return dataclasses.replace(outcome, log=tuple(self._entries), results_json=lines)
