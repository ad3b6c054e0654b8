"""Which failures are retried, and when."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.execution import ExecutionStatus, Outcome, Request
from atoll.model.outcome import without_result
from atoll.model.retry import RETRIED_CAUSES, delay, is_retried
from atoll.model.session import Cause
from tests.contract.stores.store_entities import make_execution

MOST = 3
CODE = {"code": "print(1)"}

# Status and cause of the attempt, retries before it, the request, whether it is retried.
CASES: dict[str, tuple[str, str | None, int, dict[str, Any], bool]] = {
    "instance lost": ("crashed", "instance_lost", 0, CODE, True),
    "a violation of the protocol": ("failed", "protocol", 0, CODE, False),
    "node lost": ("crashed", "node_lost", 0, CODE, True),
    "evicted": ("crashed", "evicted", 0, CODE, True),
    "lost the last time": ("crashed", "instance_lost", MOST - 1, CODE, True),
    "lost once too often": ("crashed", "instance_lost", MOST, CODE, False),
    "lost long after that": ("crashed", "instance_lost", MOST + 7, CODE, False),
    "a command": ("crashed", "instance_lost", 0, {"command": ("sh",)}, True),
    "with stdin open": ("crashed", "instance_lost", 0, CODE | {"stdin_open": True}, True),
    "in a context": ("crashed", "instance_lost", 0, CODE | {"context_id": "ctx_1"}, False),
    "on a terminal": ("crashed", "instance_lost", 0, CODE | {"terminal": (24, 80)}, False),
    "exit": ("failed", "exit", 0, CODE, False),
    "signal": ("failed", "signal", 0, CODE, False),
    "out of memory": ("failed", "oom", 0, CODE, False),
    "disk full": ("failed", "disk", 0, CODE, False),
    "time-out": ("timeout", "timeout", 0, CODE, False),
    "cancelled": ("cancelled", "user", 0, CODE, False),
    "completed": ("completed", None, 0, CODE, False),
    "crashed by its own doing": ("crashed", "exit", 0, CODE, False),
    "crashed by a signal": ("crashed", "signal", 0, CODE, False),
    "crashed for memory": ("crashed", "oom", 0, CODE, False),
    "crashed when it was ended": ("crashed", "user", 0, CODE, False),
    "crashed for no known cause": ("crashed", None, 0, CODE, False),
    "failed where the node was lost": ("failed", "node_lost", 0, CODE, False),
    "cancelled where the node was lost": ("cancelled", "node_lost", 0, CODE, False),
}


@pytest.mark.parametrize(
    ("status", "cause", "before", "given", "retried"), CASES.values(), ids=list(CASES)
)
def test_only_failures_that_the_code_did_not_cause_are_retried(
    status: str, cause: str | None, before: int, given: dict[str, Any], retried: bool
) -> None:
    execution = make_execution(request=Request(**given), retry_count=before)
    outcome = Outcome(ExecutionStatus(status), Cause(cause) if cause else None, None)

    assert is_retried(execution, outcome, MOST) is retried


@given(
    status=st.sampled_from(ExecutionStatus),
    cause=st.none() | st.sampled_from(Cause),
    before=st.integers(0, 5),
    most=st.integers(0, 5),
)
def test_the_number_of_retries_is_limited_and_failures_of_the_code_are_never_retried(
    status: ExecutionStatus, cause: Cause | None, before: int, most: int
) -> None:
    outcome = Outcome(status, cause, None)

    if is_retried(make_execution(retry_count=before), outcome, most):
        assert before < most
        assert status is ExecutionStatus.CRASHED
        assert cause in RETRIED_CAUSES


def seconds(retry: int, first: float = 1, most: float = 10) -> float:
    pause = delay(retry, first=timedelta(seconds=first), most=timedelta(seconds=most))
    return pause.total_seconds()


def test_the_pause_doubles_up_to_its_bound() -> None:
    assert [seconds(retry) for retry in range(1, 8)] == [1, 2, 4, 8, 10, 10, 10]


def test_a_first_pause_beyond_the_bound_is_the_bound() -> None:
    assert [seconds(retry, first=60) for retry in (1, 2)] == [10, 10]


def test_a_pause_of_zero_stays_zero() -> None:
    assert [seconds(retry, first=0) for retry in (1, 2, 50)] == [0, 0, 0]
    assert [seconds(retry, most=0) for retry in (1, 2, 50)] == [0, 0, 0]


@given(
    retry=st.integers(1, 10_000),
    first=st.timedeltas(timedelta(0)),
    most=st.timedeltas(timedelta(0)),
)
def test_no_number_of_retries_is_too_large(retry: int, first: timedelta, most: timedelta) -> None:
    pause = delay(retry, first=first, most=most)

    assert min(first, most) <= pause <= most
    assert pause <= delay(retry + 1, first=first, most=most)


def test_each_retry_follows_a_recorded_attempt_even_if_its_start_is_unknown() -> None:
    outcome = without_result(
        ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, "It is gone.", stdout=b"", stderr=b""
    )
    execution = make_execution(retry_count=0)
    for _ in range(2):
        execution = execution.retried(outcome, at=execution.created_at, node_id="local")
    assert execution.retry_count == 2
    assert [attempt.cause for attempt in execution.attempts] == [Cause.INSTANCE_LOST] * 2
