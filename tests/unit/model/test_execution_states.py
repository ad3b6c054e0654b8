"""An execution goes back and forth until it ends, and an end stays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.execution import RESULT_STATUS, TRANSITIONS, ExecutionStatus, may_become

from .walks import reachable, walks

PENDING, RUNNING = ExecutionStatus.PENDING, ExecutionStatus.RUNNING
ENDS = {status for status in ExecutionStatus if status.ended}

statuses = st.sampled_from(ExecutionStatus)


def test_every_status_has_transitions_and_every_final_status_a_result() -> None:
    assert set(TRANSITIONS) == set(ExecutionStatus)
    assert set(RESULT_STATUS) == ENDS == set(ExecutionStatus) - {PENDING, RUNNING}


@pytest.mark.parametrize("status", ExecutionStatus)
def test_every_status_can_reach_a_final_status(status: ExecutionStatus) -> None:
    assert reachable(TRANSITIONS, status) & ENDS


def test_every_status_is_reachable() -> None:
    assert reachable(TRANSITIONS, PENDING) == set(ExecutionStatus)


@given(walks(TRANSITIONS, PENDING))
def test_a_walk_stops_at_its_first_final_status(walk: list[ExecutionStatus]) -> None:
    *before, last = walk
    assert not any(status.ended for status in before)
    assert last.ended == (not TRANSITIONS[last])
    assert all(may_become(*step) for step in pairwise(walk))


@given(walks(TRANSITIONS, PENDING), statuses)
def test_a_final_status_never_changes(
    walk: list[ExecutionStatus], following: ExecutionStatus
) -> None:
    if walk[-1].ended:
        assert may_become(walk[-1], following) == (following is walk[-1])


@given(st.lists(statuses, max_size=30))
def test_a_record_that_allows_only_valid_transitions_ends_at_most_once(
    asked: list[ExecutionStatus],
) -> None:
    """As in the record of the store, for any requests of replicas and retries in any order."""
    status, ends = PENDING, []
    for following in asked:
        if may_become(status, following) and status is not following:
            status = following
            if status.ended:
                ends.append(status)
    assert ends == ([status] if status.ended else [])


@given(statuses)
def test_the_same_status_can_always_be_written_again(status: ExecutionStatus) -> None:
    assert may_become(status, status)


def test_a_lost_attempt_waits_for_the_next() -> None:
    assert may_become(RUNNING, PENDING)
