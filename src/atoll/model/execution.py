"""
Executions: one placement of an invocation, its attempts and its outcome.

An execution is attempted until an attempt has a final outcome or no retries are left. `failed` and
`timeout` are caused by the code; `crashed` means that Atoll could not run it: the instance was lost
more often than is retried, or something in Atoll or its driver failed. `TRANSITIONS` has the
possible changes of status.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from atoll.model.session import Cause


class ExecutionStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (ExecutionStatus.PENDING, ExecutionStatus.RUNNING)


_ENDS = frozenset(status for status in ExecutionStatus if status.ended)

TRANSITIONS: dict[ExecutionStatus, frozenset[ExecutionStatus]] = {
    ExecutionStatus.PENDING: _ENDS | {ExecutionStatus.RUNNING},
    # Back to pending if the attempt was lost and another one follows.
    ExecutionStatus.RUNNING: _ENDS | {ExecutionStatus.PENDING},
    **{status: frozenset() for status in _ENDS},
}
"""The statuses that may follow each; final ones stay."""


def may_become(status: ExecutionStatus, following: ExecutionStatus) -> bool:
    """Whether a record may change from one status to the other; it may always stay the same."""
    return status is following or following in TRANSITIONS[status]


RESULT_STATUS = {
    ExecutionStatus.COMPLETED: "success",
    ExecutionStatus.FAILED: "failed",
    ExecutionStatus.TIMEOUT: "timeout",
    ExecutionStatus.CRASHED: "error",
    ExecutionStatus.CANCELLED: "error",
}
"""How a result names each final status."""


class Mode(StrEnum):
    """How the client gets the result."""

    SYNC = "sync"
    ASYNC = "async"
    STREAM = "stream"
    CONSOLE = "console"


class Language(StrEnum):
    PYTHON = "python"
    JAVASCRIPT = "javascript"
    SHELL = "shell"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that an execution created or changed."""

    path: str
    size: int
    mime_type: str
    created_at: datetime
    checksum: str | None
    """SHA-256 in hexadecimal; null for files that are too large to be hashed at once."""
    type: str = "artifact"


@dataclass(frozen=True, slots=True)
class Request:
    """What to run: `code` in a `language`, or a `command`."""

    code: str | None = None
    language: Language | None = None
    command: tuple[str, ...] | None = None
    event: Any = None
    stdin: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float = 30.0
    """Seconds."""
    function_name: str | None = None
    """The function to call: a name in `code`, or without code `module:name` in the workspace."""
    body: str | None = None
    """Input that is not JSON, as base64, instead of `event`."""
    content_type: str | None = None
    context_id: str | None = None
    """The stateful context to run in."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of the terminal to run in; null for pipes."""
    stdin_open: bool = False
    """Whether stdin stays open for input that is sent later."""
    mode: Mode = Mode.ASYNC
    metadata: dict[str, str] = field(default_factory=dict)
    """Small values that the client stores with the invocation."""

    def same_work(self, other: Request) -> bool:
        """Whether both run the same code with the same input, however the client waits for it."""
        return all(getattr(self, name) == getattr(other, name) for name in _WORK)


_WORK = tuple(
    item.name
    for item in fields(Request)
    if item.name not in ("timeout", "terminal", "stdin_open", "mode", "metadata")
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of an execution in one instance."""

    started_at: datetime
    ended_at: datetime
    node_id: str
    instance_id: str | None
    cause: Cause | None
    """Why it ended; null if the execution completed."""
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    How an execution ended. Output is truncated at its limit; sizes are those of all output.
    """

    status: ExecutionStatus
    cause: Cause | None
    exit_code: int | None
    signal: str | None = None
    error: dict[str, Any] | None = None
    """`code`, `message` and, for an exception, `name` and `traceback`."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_size: int = 0
    stderr_size: int = 0
    return_json: bytes | None = None
    """The handler's return value as JSON; null without a handler."""
    execution_time: float = 0.0
    """Seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    artifacts_truncated: bool = False
    results_json: bytes | None = None
    """JSON lines of what it displayed and asked, in order; null if nothing."""
    log: tuple[tuple[int, int], ...] | None = None
    """
    The pieces in which output arrived, in order: channel and length of each. Gaps stand for the
    pieces that are not kept. None if unknown.
    """


@dataclass(frozen=True, slots=True)
class Execution:
    id: str
    session_id: str
    request: Request
    status: ExecutionStatus
    created_at: datetime
    instance_id: str | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    retry_count: int = 0
    invocation_id: str | None = None
    """None for executions that are older than invocations."""
    ordinal: int = 1
    """Its position among the executions of its invocation."""
    superseded: bool = False
    """Whether its invocation has a later execution."""
    invoked_at: datetime | None = None
    """When the first execution of its invocation was created; None for that one."""
    attempts: tuple[Attempt, ...] = ()
    """Attempts that have ended, in order."""
    outcome: Outcome | None = None
    """Set if the status is final."""
    holder: str | None = None
    """The replica that owns it until it ends."""
    kept: dict[str, str] = field(default_factory=dict)
    """Keys in the blob store of parts that are too large for a row, by the part's name."""
    version: int = 1

    def attempted(self, outcome: Outcome, *, at: datetime, node_id: str) -> tuple[Attempt, ...]:
        """The attempts including the one with this outcome, if it started at all."""
        if self.started_at is None:
            return self.attempts
        last = Attempt(
            started_at=self.started_at,
            ended_at=at,
            node_id=node_id,
            instance_id=self.instance_id,
            cause=outcome.cause,
            message=None if outcome.error is None else outcome.error.get("message"),
        )
        return (*self.attempts, last)

    def ended(self, outcome: Outcome, *, at: datetime, node_id: str) -> Execution:
        assert may_become(self.status, outcome.status)
        return replace(
            self,
            status=outcome.status,
            outcome=outcome,
            completed_at=at,
            attempts=self.attempted(outcome, at=at, node_id=node_id),
        )

    def retried(self, outcome: Outcome, *, at: datetime, node_id: str) -> Execution:
        """The execution as it waits for its next attempt."""
        assert may_become(self.status, ExecutionStatus.PENDING)
        # If the replica that made the attempt was lost, its start time was lost with it.
        lost = replace(self, started_at=self.started_at or at)
        return replace(
            self,
            status=ExecutionStatus.PENDING,
            instance_id=None,
            started_at=None,
            retry_count=self.retry_count + 1,
            attempts=lost.attempted(outcome, at=at, node_id=node_id),
        )
