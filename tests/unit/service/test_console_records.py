"""Console output of an ended execution, and the stored output of a terminal."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from atoll.model.execution import Execution, ExecutionStatus, Outcome, Request
from atoll.protocol import frames
from atoll.service.executions.console import rest
from atoll.service.executions.event_log import GAP, EventLog, lines_of
from atoll.settings import ExecutionSettings

OUT, ERR, VALUE, ASK = frames.STDOUT, frames.STDERR, frames.VALUE, frames.APPROVAL
DONE = ExecutionStatus.COMPLETED
EXECUTION = Execution(
    "exec_1", "sess_1", Request(), ExecutionStatus.PENDING, datetime(2026, 1, 1, tzinfo=UTC)
)


@pytest.mark.parametrize(
    ("log", "after", "told"),
    [
        (((OUT, 2), (ERR, 1), (VALUE, 9), (OUT, 1)), 0, [(1, OUT, b"ab"), (2, ERR, b"x"),
                                                        (4, OUT, b"c")]),
        (((OUT, 2), (ERR, 1), (VALUE, 9), (OUT, 1)), 1, [(2, ERR, b"x"), (4, OUT, b"c")]),
        (((OUT, 2), (ERR, 1), (OUT, 1)), 3, []),
        (((OUT, 2), (OUT, 5), (OUT, 5)), 0, [(1, OUT, b"ab"), (2, OUT, b"c")]),
        (((GAP, 7), (OUT, 2), (OUT, 1), (ERR, 1)), 8, [(9, OUT, b"c"), (10, ERR, b"x")]),
    ],
    ids=["all", "the rest", "nothing", "a record that was cut", "a ring"],
)  # fmt: skip
@pytest.mark.parametrize("attempt", [0, 2])
def test_the_rest_of_the_output_comes_from_the_record(
    log: tuple[tuple[int, int], ...],
    after: int,
    told: list[tuple[int, int, bytes]],
    attempt: int,
) -> None:
    outcome = Outcome(DONE, None, 0, stdout=b"abc", stderr=b"x", log=log)
    ended = dataclasses.replace(EXECUTION, status=DONE, outcome=outcome, retry_count=attempt)
    assert list(rest(ended, after)) == told


def _ring(size: int, entries: list[tuple[int, bytes]]) -> EventLog:
    terminal = dataclasses.replace(EXECUTION.request, terminal=(24, 80))
    execution = dataclasses.replace(EXECUTION, request=terminal)
    events = EventLog(execution, ExecutionSettings.model_construct(output_limit=size))
    events.started()
    for sequence, (channel, data) in enumerate(entries, 1):
        events.append(sequence, channel, data)
    return events


def test_events_of_a_terminal_record_keep_the_numbers_of_the_executor() -> None:
    question = b'{"id": "1", "state": "asked"}\n'
    entries = [(OUT, b"%03d." % number) for number in range(100)]
    entries[50:50] = [(ASK, question)]
    events = _ring(40, entries)
    outcome = events.with_log(Outcome(DONE, None, 0, stdout=events.output("stdout")))
    ended = dataclasses.replace(EXECUTION, status=DONE, outcome=outcome)
    assert list(rest(ended, 0)) == [
        (sequence, channel, data)
        for sequence, (channel, data) in enumerate(entries, 1)
        if sequence > 91
    ]
    assert outcome.log is not None
    assert len(outcome.log) == 13
    assert [line["id"] for line in lines_of(outcome)] == ["1"]


def test_the_number_of_tiny_pieces_in_a_terminal_record_is_limited() -> None:
    events = _ring(1 << 20, [(OUT, b"x")] * 20_000)
    _, kept = events.since(0)
    assert len(kept) <= 8192
    outcome = events.with_log(Outcome(DONE, None, 0))
    assert outcome.log is not None
    assert outcome.log[0][0] == GAP
    assert sum(size if channel == GAP else 1 for channel, size in outcome.log) == 20_000
