"""
One placement of a request to run something, and what came of it.

An execution is tried until an attempt comes to an end of its own, or no more attempts are allowed;
`MOVES` is how its status may change. `failed` and `timeout` are the code's own ends; `crashed` is
the end of one whose instance was lost, by no fault of the code, as often as that is forgiven.
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

MOVES: dict[ExecutionStatus, frozenset[ExecutionStatus]] = {
    ExecutionStatus.PENDING: _ENDS | {ExecutionStatus.RUNNING},
    # Back to pending when the attempt was lost and there will be another.
    ExecutionStatus.RUNNING: _ENDS | {ExecutionStatus.PENDING},
    **{status: frozenset() for status in _ENDS},
}
"""What a status may become; an end stays."""


def may_become(status: ExecutionStatus, following: ExecutionStatus) -> bool:
    """Whether a record of one status may be written with the other; the same one always may."""
    return status is following or following in MOVES[status]


RESULT_STATUS = {
    ExecutionStatus.COMPLETED: "success",
    ExecutionStatus.FAILED: "failed",
    ExecutionStatus.TIMEOUT: "timeout",
    ExecutionStatus.CRASHED: "error",
    ExecutionStatus.CANCELLED: "error",
}
"""The word that a result uses for each final status."""


class Mode(StrEnum):
    """How who invokes hears of the result."""

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
    """A file that an execution made or changed."""

    path: str
    size: int
    mime_type: str
    created_at: datetime
    checksum: str | None
    """SHA-256 in hexadecimal; none for files beyond the size that is hashed at once."""
    type: str = "artifact"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run: `code` in a `language`, or a `command`."""

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
    """What is called: a name in `code`, or without code `module:name` in the workspace."""
    body: str | None = None
    """Input that is not JSON, as base64; given instead of `event`."""
    content_type: str | None = None
    context_id: str | None = None
    """The stateful context to run in."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of the terminal to run on; none for pipes."""
    stdin_open: bool = False
    """Whether stdin stays open for what is injected later."""
    mode: Mode = Mode.ASYNC
    metadata: dict[str, str] = field(default_factory=dict)
    """What the invoker wants to find with it again; never much."""

    def same_work(self, other: Request) -> bool:
        """Whether both run the same thing with the same input, however they are waited for."""
        return all(getattr(self, name) == getattr(other, name) for name in _WORK)


_WORK = tuple(
    item.name
    for item in fields(Request)
    if item.name not in ("timeout", "terminal", "stdin_open", "mode", "metadata")
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at an execution in one instance."""

    started_at: datetime
    ended_at: datetime
    node_id: str
    instance_id: str | None
    cause: Cause | None
    """Why it ended; none when the execution completed."""
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    How an execution ended. Output is bytes as they came, cut at the limit; sizes are the full ones.
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
    """The handler's return value as JSON text; none when there was no handler."""
    execution_time: float = 0.0
    """Seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    artifacts_truncated: bool = False
    results_json: bytes | None = None
    """What a context showed, as a JSON list of MIME bundles; none when it showed nothing."""
    log: tuple[tuple[int, int], ...] | None = None
    """
    In what pieces output came: channel and length of each, the first has sequence number 1. None
    when that is not known.
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
    """None for those of before there were invocations."""
    ordinal: int = 1
    """Its number among the executions of its invocation."""
    superseded: bool = False
    """Whether another execution of its invocation came after it."""
    invoked_at: datetime | None = None
    """When the first execution of its invocation was made; None for that one."""
    attempts: tuple[Attempt, ...] = ()
    """Those that have ended, in order."""
    outcome: Outcome | None = None
    """Set when the status is final."""
    holder: str | None = None
    """The replica that sees to it until it ends."""
    kept: dict[str, str] = field(default_factory=dict)
    """Parts that are too large for a row, by name, and where they are in the blob store."""
    version: int = 1

    def attempted(self, outcome: Outcome, *, at: datetime, node_id: str) -> tuple[Attempt, ...]:
        """Its attempts with the one that came to this, if it began at all."""
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
        """As it waits for its next attempt, which has begun nowhere yet."""
        assert may_become(self.status, ExecutionStatus.PENDING)
        # When one began that was lost with its replica, the replica alone knew.
        lost = replace(self, started_at=self.started_at or at)
        return replace(
            self,
            status=ExecutionStatus.PENDING,
            instance_id=None,
            started_at=None,
            retry_count=self.retry_count + 1,
            attempts=lost.attempted(outcome, at=at, node_id=node_id),
        )
