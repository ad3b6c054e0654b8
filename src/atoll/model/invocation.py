"""
Invocations: requests to run something, whose ids are stable.

Each placement of an invocation is an execution. The status of an invocation follows from that of
its latest execution, and only executions are stored. Another execution is created after one that
failed, never while one runs or after one that succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.model.execution import Execution, ExecutionStatus, Mode


class InvocationStatus(StrEnum):
    ACCEPTED = "accepted"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (InvocationStatus.ACCEPTED, InvocationStatus.RUNNING)


STATUS_OF = {
    ExecutionStatus.PENDING: InvocationStatus.ACCEPTED,
    ExecutionStatus.RUNNING: InvocationStatus.RUNNING,
    ExecutionStatus.COMPLETED: InvocationStatus.SUCCEEDED,
    ExecutionStatus.FAILED: InvocationStatus.FAILED,
    ExecutionStatus.TIMEOUT: InvocationStatus.FAILED,
    ExecutionStatus.CRASHED: InvocationStatus.FAILED,
    ExecutionStatus.CANCELLED: InvocationStatus.CANCELLED,
}
"""The status of an invocation by that of its latest execution."""

STATUSES_OF = {
    status: tuple(one for one in ExecutionStatus if STATUS_OF[one] is status)
    for status in InvocationStatus
}
"""The statuses that the latest execution may have, by that of the invocation."""


@dataclass(frozen=True, slots=True)
class Invocation:
    id: str
    session_id: str
    execution_id: str
    """The latest."""
    mode: Mode
    status: InvocationStatus
    created_at: datetime
    function_name: str | None = None
    completed_at: datetime | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def invocation_of(latest: Execution) -> Invocation:
    """The invocation that this is the latest execution of."""
    assert latest.invocation_id is not None
    return Invocation(
        id=latest.invocation_id,
        session_id=latest.session_id,
        execution_id=latest.id,
        mode=latest.request.mode,
        status=STATUS_OF[latest.status],
        created_at=latest.invoked_at or latest.created_at,
        function_name=latest.request.function_name,
        completed_at=latest.completed_at if latest.status.ended else None,
        metadata=latest.request.metadata,
    )
