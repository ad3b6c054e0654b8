"""
The events of an execution, each with a number that is larger than the last one's.

A number says where in the executor's log an event is, and of which attempt; so whoever tells it,
this replica, another one, or years later the record, gives it the same number, and one who comes
back with the last number heard is told exactly the rest. Within an attempt 0 is its announcement
as a retry, 1 its start, an entry of the log has its sequence number and one more, and the result
has the last number of all. Events that only tell how things are (a place in the line, a heartbeat)
have no number and are not told again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.link.messages import approval
from atoll.link.values import is_within, strict_json
from atoll.model.json_size import values_in
from atoll.model.stream_event import StreamEvent
from atoll.protocol import frames
from atoll.service.executions.mime import DEPTH, VALUES, shaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.model.execution import Execution, Outcome

ATTEMPT_BITS = 32
GAP = 0
"""A channel of a record's log: so many entries are not kept."""
OUTPUTS = {frames.STDOUT: "stdout", frames.STDERR: "stderr"}
LINES = {frames.APPROVAL: "approval", frames.DISPLAY: "display"}
"""Channels of JSON lines, and the events that they are."""


def number(retry_count: int, place: int) -> int:
    return (retry_count << ATTEMPT_BITS) + place


def of_entry(retry_count: int, sequence: int) -> int:
    return number(retry_count, sequence + 1)


def of_result(retry_count: int) -> int:
    """
    Behind all that the attempt can have told: what a replica had told of it when it was lost
    together with the instance, no record has.
    """
    return number(retry_count + 1, 0) - 1


class LineBuffer:
    """
    JSON lines out of pieces. User code has a hand in them: what is no JSON object is left out, and
    what has more values than may be made of all the lines of an execution.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._room = VALUES

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._pending += data
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            count = values_in(line, VALUES)
            if count > self._room:
                continue
            self._room -= count
            try:
                value = strict_json(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def told_of(channel: int, line: dict[str, Any]) -> dict[str, Any] | None:
    """What is told of a line; nothing of one that is not what its channel is for."""
    if channel == frames.DISPLAY:
        return shaped(line)
    return approval(line) if is_within(line, DEPTH) else None


def lines_of(outcome: Outcome) -> list[dict[str, Any]]:
    """The questions that were asked and what was shown, in order."""
    return list(LineBuffer().feed(outcome.results_json or b""))


def replay(execution: Execution) -> Iterator[StreamEvent]:
    """The events of an execution that has ended, from its record."""
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
    whole = {"stdout": outcome.stdout, "stderr": outcome.stderr}
    log = outcome.log
    if log is None:
        log = ((frames.STDOUT, len(outcome.stdout)), (frames.STDERR, len(outcome.stderr)))
    told, lines, taken = dict.fromkeys(whole, 0), LineBuffer(), 0
    shown = outcome.results_json or b""
    sequence = 0
    for channel, size in log:
        sequence += size if channel == GAP else 1
        here = of_entry(attempt, sequence)
        if channel in OUTPUTS:
            name = OUTPUTS[channel]
            piece = whole[name][told[name] : told[name] + size]
            told[name] += size
            if piece:
                yield StreamEvent(here, name, piece)
        elif channel in LINES:
            for line in lines.feed(shown[taken : taken + size]):
                if (content := told_of(channel, line)) is not None:
                    yield StreamEvent(here, LINES[channel], content)
            taken += size
