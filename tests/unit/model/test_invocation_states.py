"""An invocation is as its latest execution is; only one that failed is begun anew."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model import execution
from atoll.model.execution import ExecutionStatus
from atoll.model.invocation import MOVES, STATUS_OF, InvocationStatus

from .walks import reachable, walks

ACCEPTED, FAILED = InvocationStatus.ACCEPTED, InvocationStatus.FAILED
ENDS = {status for status in InvocationStatus if status.ended}

execution_walks = walks(execution.MOVES, ExecutionStatus.PENDING)


def is_legal(walk: list[InvocationStatus]) -> bool:
    return all(before is after or after in MOVES[before] for before, after in pairwise(walk))


def test_every_status_has_its_moves() -> None:
    assert set(MOVES) == set(InvocationStatus)
    assert set(InvocationStatus) - {ACCEPTED, InvocationStatus.RUNNING} == ENDS


@pytest.mark.parametrize("status", InvocationStatus)
def test_from_everywhere_there_is_a_way_to_an_end(status: InvocationStatus) -> None:
    assert reachable(MOVES, status) & ENDS


@given(walks(MOVES, ACCEPTED))
def test_a_walk_leaves_an_end_only_to_try_again_what_failed(
    walk: list[InvocationStatus],
) -> None:
    for before, after in pairwise(walk):
        if before.ended:
            assert (before, after) == (FAILED, ACCEPTED)
    if not MOVES[walk[-1]]:
        assert walk[-1].ended


def test_every_status_of_an_execution_is_one_of_an_invocation() -> None:
    assert set(STATUS_OF) == set(ExecutionStatus)
    assert set(STATUS_OF.values()) == set(InvocationStatus)
    for status, of_invocation in STATUS_OF.items():
        assert status.ended == of_invocation.ended


@given(execution_walks)
def test_an_execution_takes_its_invocation_along_a_legal_way(walk: list[ExecutionStatus]) -> None:
    assert is_legal([STATUS_OF[status] for status in walk])


@given(st.lists(execution_walks, min_size=1, max_size=5))
def test_so_do_several_executions_each_after_one_that_failed(
    several: list[list[ExecutionStatus]],
) -> None:
    walk: list[InvocationStatus] = []
    for one in several:
        walk += [STATUS_OF[status] for status in one]
        if walk[-1] is not FAILED:
            break

    assert walk[0] is ACCEPTED
    assert is_legal(walk)


@pytest.mark.parametrize("status", sorted(ENDS - {FAILED}))
def test_no_other_end_is_followed_by_another_execution(status: InvocationStatus) -> None:
    assert ACCEPTED not in MOVES[status]
