"""An invocation has the status of its latest execution; only a failed one can be retried."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model import execution
from atoll.model.execution import Execution, ExecutionStatus, Mode, Request
from atoll.model.invocation import (
    STATUS_OF,
    STATUSES_OF,
    Invocation,
    InvocationStatus,
    invocation_of,
)

from .walks import walks

ACCEPTED, FAILED = InvocationStatus.ACCEPTED, InvocationStatus.FAILED
ENDS = {status for status in InvocationStatus if status.ended}
LEGAL = {
    ACCEPTED: ENDS | {InvocationStatus.RUNNING},
    InvocationStatus.RUNNING: ENDS | {ACCEPTED},
    FAILED: {ACCEPTED},  # By another execution.
}

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FIRST = Execution(
    id="exec_1",
    session_id="sess_1",
    request=Request(function_name="f", mode=Mode.CONSOLE, metadata={"k": "v"}),
    status=ExecutionStatus.PENDING,
    created_at=NOW,
    invocation_id="inv_1",
)

execution_walks = walks(execution.TRANSITIONS, ExecutionStatus.PENDING)


def is_legal(walk: list[InvocationStatus]) -> bool:
    return all(
        before is after or after in LEGAL.get(before, ()) for before, after in pairwise(walk)
    )


def test_every_status_of_an_execution_maps_to_one_of_an_invocation() -> None:
    assert set(STATUS_OF) == set(ExecutionStatus)
    assert set(STATUS_OF.values()) == set(InvocationStatus)
    for status, of_invocation in STATUS_OF.items():
        assert status.ended == of_invocation.ended


def test_every_status_of_an_execution_belongs_to_exactly_one_of_an_invocation() -> None:
    shared = [status for several in STATUSES_OF.values() for status in several]
    assert sorted(shared) == sorted(ExecutionStatus)
    for status, several in STATUSES_OF.items():
        assert {STATUS_OF[one] for one in several} == {status}


@pytest.mark.parametrize("status", ExecutionStatus)
def test_an_invocation_has_the_status_of_its_only_execution(status: ExecutionStatus) -> None:
    completed_at = NOW + timedelta(seconds=1) if status.ended else None

    assert invocation_of(replace(FIRST, status=status, completed_at=completed_at)) == Invocation(
        id="inv_1",
        session_id="sess_1",
        execution_id="exec_1",
        mode=Mode.CONSOLE,
        status=STATUS_OF[status],
        created_at=NOW,
        function_name="f",
        completed_at=completed_at,
        metadata={"k": "v"},
    )


def test_an_invocation_began_with_its_first_execution() -> None:
    later = NOW + timedelta(hours=1)
    second = replace(FIRST, id="exec_2", ordinal=2, created_at=later, invoked_at=NOW)

    found = invocation_of(second)

    assert (found.execution_id, found.created_at) == ("exec_2", NOW)


def test_a_retried_invocation_has_no_completion_time() -> None:
    waiting = replace(FIRST, completed_at=NOW, status=ExecutionStatus.PENDING)

    assert invocation_of(waiting).completed_at is None


@given(execution_walks)
def test_executions_take_their_invocation_only_through_valid_transitions(
    walk: list[ExecutionStatus],
) -> None:
    assert is_legal([invocation_of(replace(FIRST, status=status)).status for status in walk])


@given(st.lists(execution_walks, min_size=1, max_size=5))
def test_retries_take_their_invocation_only_through_valid_transitions(
    several: list[list[ExecutionStatus]],
) -> None:
    walk: list[Invocation] = []
    for number, one in enumerate(several, 1):
        at = {"ordinal": number, "invoked_at": NOW if number > 1 else None}
        latest = replace(FIRST, id=f"exec_{number}", **at)  # type: ignore[arg-type]
        walk += [invocation_of(replace(latest, status=status)) for status in one]
        if walk[-1].status is not FAILED:
            break

    assert walk[0].status is ACCEPTED
    assert is_legal([found.status for found in walk])
    assert len({(found.id, found.created_at) for found in walk}) == 1
