"""
What is retried, and when.

Only what the code did not cause: its instance was lost, or evicted, or the node's driver failed.
What the code did to itself (its own errors, its time-out, its memory) and what a person asked for
would only come out the same again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.execution import ExecutionStatus
from atoll.model.session import Cause

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.model.execution import Execution, Outcome

FORGIVEN = frozenset({Cause.INSTANCE_LOST, Cause.NODE_LOST, Cause.EVICTED})
"""Causes of a crash after which there is another attempt."""


def is_retried(execution: Execution, outcome: Outcome, most: int) -> bool:
    """Whether an execution whose attempt came to this is tried again; at most `most` times."""
    return (
        outcome.status is ExecutionStatus.CRASHED
        and outcome.cause in FORGIVEN
        # What a context knew went with the instance, and a terminal's user is not there twice.
        and execution.request.context_id is None
        and execution.request.terminal is None
        and execution.retry_count < most
    )


def delay(retry: int, *, first: timedelta, most: timedelta) -> timedelta:
    """The pause before the retry of this number, from 1 on: it doubles each time."""
    pause = first
    for _ in range(1, retry):
        # Not doubled further than it counts: a timedelta may have no room for that.
        if pause >= most / 2:
            return most
        pause *= 2
    return min(pause, most)
