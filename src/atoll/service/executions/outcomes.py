"""Outcomes of executions that have no result of the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.execution import ExecutionStatus
from atoll.model.outcome import without_result
from atoll.model.session import Cause, SessionStatus

if TYPE_CHECKING:
    from atoll.errors import PermanentError
    from atoll.link.errors import ExecutorError
    from atoll.model.execution import Outcome
    from atoll.service.executions.run import Run


def outcome_of_stop(run: Run) -> Outcome:
    """The outcome of an execution that was cancelled, or whose session ended or was stopped."""
    session = run.stopped_by
    if session is None:
        error = cancellation(run)
        return outcome_with_output(
            run, ExecutionStatus.CANCELLED, Cause.USER, error["message"], code=error["code"]
        )
    expired = session.status is SessionStatus.TIMEOUT
    return outcome_with_output(
        run,
        ExecutionStatus.TIMEOUT if expired else ExecutionStatus.CANCELLED,
        session.cause or Cause.USER,
        "The session ended." if session.status.ended else "The session was stopped.",
    )


def cancellation(run: Run) -> dict[str, str]:
    reason = "." if run.cancel_reason is None else f": {run.cancel_reason}"
    return {"code": "cancelled", "message": f"The execution was cancelled{reason}"}


def outcome_with_output(
    run: Run, status: ExecutionStatus, cause: Cause, message: str, *, code: str | None = None
) -> Outcome:
    """An outcome without a result, with the output that has arrived."""
    return without_result(
        status,
        cause,
        message,
        code=code,
        stdout=run.events.output("stdout"),
        stderr=run.events.output("stderr"),
    )


def outcome_of_missing(error: PermanentError | ExecutorError) -> Outcome:
    """The outcome of an execution that lacks something it needs."""
    return without_result(
        ExecutionStatus.FAILED,
        Cause.DEPENDENCY,
        error.message,
        code=error.code,
    )
