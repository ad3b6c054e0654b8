"""Whoever tells an execution's events gives them the same numbers."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.execution import Attempt, Execution, ExecutionStatus, Outcome, Request
from atoll.model.session import Cause
from atoll.protocol import frames
from atoll.service.executions import event_log
from atoll.service.executions.run import Run

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LINE = {"type": "display", "data": {"text/plain": "x" * 10}}
QUESTION = {"id": "1", "state": "asked", "question": "Really?"}


def pieces_of(channel: int, value: dict[str, Any], cut: int) -> list[tuple[int, bytes]]:
    line = json.dumps(value).encode() + b"\n"
    return [(channel, line[:cut]), (channel, line[cut:])]


OUTPUT = st.tuples(
    st.sampled_from([frames.STDOUT, frames.STDERR, frames.VALUE]), st.binary(min_size=1, max_size=5)
).map(lambda piece: [piece])
SHOWN = st.integers(1, 20).map(lambda cut: pieces_of(frames.DISPLAY, LINE, cut))
ASKED = st.integers(1, 20).map(lambda cut: pieces_of(frames.APPROVAL, QUESTION, cut))
LOGS = st.lists(st.one_of(OUTPUT, SHOWN, ASKED), max_size=8).map(
    lambda parts: [piece for part in parts for piece in part]
)


def execution(retry_count: int) -> Execution:
    lost = Attempt(NOW, NOW, "local", "inst_1", Cause.INSTANCE_LOST)
    return Execution(
        "exec_1", "sess_1", Request(code=""), ExecutionStatus.PENDING, NOW,
        retry_count=retry_count, attempts=(lost,) * retry_count,
    )  # fmt: skip


def ended(heard: Run) -> Execution:
    """The record of what was heard."""
    outcome = Outcome(
        ExecutionStatus.COMPLETED, None, 0,
        stdout=heard.gathered("stdout"), stderr=heard.gathered("stderr"),
        log=tuple(heard.log), results_json=bytes(heard.lines) or None,
    )  # fmt: skip
    shown = heard.execution
    return Execution(
        shown.id, shown.session_id, shown.request, outcome.status, NOW,
        retry_count=shown.retry_count, attempts=shown.attempts, outcome=outcome,
    )  # fmt: skip


def hear(log: list[tuple[int, bytes]], retry_count: int, *, after: int = 0) -> Run:
    heard = Run(execution(retry_count))
    heard.sequence = after
    heard.started()
    for sequence, (channel, data) in enumerate(log, 1):
        if sequence > after:
            heard.output(sequence, channel, data)
    return heard


def run(work: Any) -> Any:
    with asyncio.Runner() as runner:
        return runner.run(work)


@given(log=LOGS, retry_count=st.integers(0, 3))
def test_the_record_tells_what_was_told_live(
    log: list[tuple[int, bytes]], retry_count: int
) -> None:
    async def work() -> None:
        heard = hear(log, retry_count)
        replayed = list(event_log.replay(ended(heard)))
        numbers = [event.number or 0 for event in replayed]
        assert numbers == sorted(set(numbers))
        told = [event for event in replayed if event.name not in ("retry", "result")]
        assert told == heard.events
        assert replayed[-1].name == "result"

    run(work())


@given(log=LOGS, retry_count=st.integers(0, 3), stop=st.integers(min_value=0))
def test_one_who_comes_back_hears_exactly_the_rest(
    log: list[tuple[int, bytes]], retry_count: int, stop: int
) -> None:
    async def work() -> None:
        heard = hear(log, retry_count)
        whole = list(event_log.replay(ended(heard)))
        first = whole[: stop % (len(whole) + 1)]
        after = max((event.number or 0 for event in first), default=-1)
        rest = [event for event in event_log.replay(ended(heard)) if (event.number or 0) > after]
        assert first + rest == whole

    run(work())


def test_one_who_heard_more_than_was_recorded_hears_the_result() -> None:
    async def work() -> None:
        # Told by a replica that was lost together with the instance.
        after = event_log.of_entry(1, 1000)
        replayed = event_log.replay(ended(hear([], 1)))
        assert [event.name for event in replayed if (event.number or 0) > after] == ["result"]

    run(work())


@given(log=LOGS, known=st.integers(0, 20))
def test_what_a_mirror_missed_the_record_completes(
    log: list[tuple[int, bytes]], known: int
) -> None:
    async def work() -> None:
        heard = hear(log, 0)
        mirror = hear(log[:known], 0)
        mirror.complete(ended(heard))
        names = ("stdout", "stderr", "display", "approval")
        assert [event for event in mirror.events if event.name in names] == [
            event for event in heard.events if event.name in names
        ]

    run(work())


async def test_a_terminal_keeps_the_last_of_what_was_written() -> None:
    heard = Run(execution(0))
    heard.ring = 100
    for sequence in range(1, 1001):
        heard.output(sequence, frames.STDOUT, b"%03d\n" % (sequence % 1000))

    kept = heard.gathered("stdout")
    assert 90 <= len(kept) <= 104
    assert kept.endswith(b"999\n000\n")
    assert heard.told == 1000


async def test_what_a_lost_attempt_wrote_is_not_the_result_s() -> None:
    heard = hear([(frames.STDOUT, b"lost"), (frames.VALUE, b"V1")], 0)
    heard.next_attempt(execution(1), cause="instance_lost")
    heard.started()
    heard.output(1, frames.STDOUT, b"kept")

    assert heard.gathered("stdout") == b"kept"
    assert (bytes(heard.value), heard.log) == (b"", [(frames.STDOUT, 4)])
    numbers = [event.number or 0 for event in heard.events]
    assert numbers == sorted(set(numbers))
    assert numbers[-3:] == [1 << 32, (1 << 32) + 1, (1 << 32) + 2]


def test_lines_that_are_no_json_are_left_out() -> None:
    lines = event_log.LineBuffer()
    assert list(lines.feed(b"garbage\n[1]\n{")) == []
    assert list(lines.feed(b'"a":1}\n\xff\n' + b"[" * 100_000 + b"\n")) == [{"a": 1}]
