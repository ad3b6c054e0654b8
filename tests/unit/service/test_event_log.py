"""Events of an execution have the same numbers live, on other replicas, and in the record."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.model.execution import Attempt, Execution, ExecutionStatus, Outcome, Request
from atoll.model.session import Cause
from atoll.model.stream_event import StreamEvent
from atoll.protocol import frames
from atoll.service.executions import event_log
from atoll.service.executions.event_log import EventLog
from atoll.settings import ExecutionSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LINE = {"type": "display", "data": {"text/plain": "x" * 10}}
QUESTION = {"id": "1", "state": "asked", "question": "Really?"}


def pieces_of(channel: int, value: dict[str, Any], cut: int) -> list[tuple[int, bytes]]:
    line = json.dumps(value).encode() + b"\n"
    return [(channel, line[:cut]), (channel, line[cut:])]


OUTPUT = st.tuples(
    st.sampled_from([frames.STDOUT, frames.STDERR, frames.VALUE]), st.binary(min_size=1, max_size=5)
).map(lambda piece: [piece])
DISPLAYED = st.integers(1, 20).map(lambda cut: pieces_of(frames.DISPLAY, LINE, cut))
ASKED = st.integers(1, 20).map(lambda cut: pieces_of(frames.APPROVAL, QUESTION, cut))
LOGS = st.lists(st.one_of(OUTPUT, DISPLAYED, ASKED), max_size=8).map(
    lambda parts: [piece for part in parts for piece in part]
)


def execution(retry_count: int, **request: Any) -> Execution:
    lost = Attempt(NOW, NOW, "local", "inst_1", Cause.INSTANCE_LOST)
    return Execution(
        "exec_1", "sess_1", Request(code="", **request), ExecutionStatus.PENDING, NOW,
        retry_count=retry_count, attempts=(lost,) * retry_count,
    )  # fmt: skip


def live(log: list[tuple[int, bytes]], retry_count: int) -> EventLog:
    events = EventLog(execution(retry_count), ExecutionSettings())
    events.started()
    for sequence, (channel, data) in enumerate(log, 1):
        events.append(sequence, channel, data)
    return events


def events_of(log: EventLog) -> list[StreamEvent]:
    return log.since(0)[1]


def record(events: EventLog, retry_count: int) -> Execution:
    outcome = Outcome(
        ExecutionStatus.COMPLETED,
        None,
        0,
        stdout=events.output("stdout"),
        stderr=events.output("stderr"),
    )
    return dataclasses.replace(
        execution(retry_count),
        status=ExecutionStatus.COMPLETED,
        outcome=events.with_log(outcome),
    )


@given(log=LOGS, retry_count=st.integers(0, 3))
def test_the_record_replays_the_live_events(log: list[tuple[int, bytes]], retry_count: int) -> None:
    events = live(log, retry_count)
    replayed = list(event_log.replay(record(events, retry_count)))
    numbers = [event.number or 0 for event in replayed]
    assert numbers == sorted(set(numbers))
    assert [e for e in replayed if e.name not in ("retry", "result")] == events_of(events)
    assert replayed[-1].name == "result"


@given(log=LOGS, retry_count=st.integers(0, 3), stop=st.integers(min_value=0))
def test_a_client_that_resumes_gets_exactly_the_rest(
    log: list[tuple[int, bytes]], retry_count: int, stop: int
) -> None:
    ended = record(live(log, retry_count), retry_count)
    everything = list(event_log.replay(ended))
    first = everything[: stop % (len(everything) + 1)]
    after = max((event.number or 0 for event in first), default=-1)
    rest = [event for event in event_log.replay(ended) if (event.number or 0) > after]
    assert first + rest == everything


def test_a_client_that_has_more_than_was_recorded_gets_the_result() -> None:
    # Sent by a replica that was lost together with the instance.
    after = event_log.entry_number(1, 1000)
    replayed = event_log.replay(record(live([], 1), 1))
    assert [event.name for event in replayed if (event.number or 0) > after] == ["result"]


@given(log=LOGS, received=st.integers(0, 20))
def test_the_record_completes_what_a_follower_has_missed(
    log: list[tuple[int, bytes]], received: int
) -> None:
    events, follower = live(log, 0), live(log[:received], 0)
    follower.complete(record(events, 0))
    names = ("stdout", "stderr", "display", "approval")
    assert [event for event in events_of(follower) if event.name in names] == [
        event for event in events_of(events) if event.name in names
    ]


def test_a_terminal_keeps_the_last_output() -> None:
    settings = ExecutionSettings(output_limit=1024)
    events = EventLog(execution(0, terminal=(24, 80)), settings)
    for sequence in range(1, 1001):
        events.append(sequence, frames.STDOUT, b"%03d\n" % (sequence % 1000))

    kept = events.output("stdout")
    assert 1000 <= len(kept) <= 1028
    assert kept.endswith(b"999\n000\n")
    assert events.end == 1000


def test_output_of_a_lost_attempt_is_not_part_of_the_result() -> None:
    events = live([(frames.STDOUT, b"lost"), (frames.VALUE, b"V1")], 0)
    events.next_attempt(1, {"cause": "instance_lost"})
    events.started()
    events.append(1, frames.STDOUT, b"kept")

    assert events.output("stdout") == b"kept"
    outcome = events.with_log(Outcome(ExecutionStatus.COMPLETED, None, 0))
    assert (events.value, outcome.log) == (b"", ((frames.STDOUT, 4),))
    numbers = [event.number or 0 for event in events_of(events)]
    assert numbers == sorted(set(numbers))
    assert numbers[-3:] == [1 << 32, (1 << 32) + 1, (1 << 32) + 2]


def test_lines_that_are_not_json_objects_are_dropped() -> None:
    lines = event_log.LineBuffer()
    assert list(lines.feed(b"garbage\n[1]\n{")) == []
    assert list(lines.feed(b'"a":1}\n\xff\n' + b"[" * 100_000 + b"\n")) == [{"a": 1}]
