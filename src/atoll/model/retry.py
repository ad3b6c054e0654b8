"""
Which attempts are retried, and when.

Only attempts whose instance or node was lost, or whose instance was evicted: the code did not cause
that. Its own errors, timeouts and memory use would only happen again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.execution import ExecutionStatus
from atoll.model.session import Cause

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.model.execution import Execution, Outcome

RETRIED_CAUSES = frozenset({Cause.INSTANCE_LOST, Cause.NODE_LOST, Cause.EVICTED})
"""Causes of a crash that is retried."""


def is_retried(execution: Execution, outcome: Outcome, max_retries: int) -> bool:
    """Whether an execution is retried after an attempt with this outcome."""
    return (
        outcome.status is ExecutionStatus.CRASHED
        and outcome.cause in RETRIED_CAUSES
        # The state of a context was lost with the instance; a terminal's input cannot be replayed.
        and execution.request.context_id is None
        and execution.request.terminal is None
        and execution.retry_count < max_retries
    )


def delay(retry: int, *, first: timedelta, most: timedelta) -> timedelta:
    """The pause before the n-th retry: `first`, doubled each time, at most `most`."""
    pause = first
    for _ in range(1, retry):
        # Stop before a timedelta overflows.
        if pause >= most / 2:
            return most
        pause *= 2
    return min(pause, most)
