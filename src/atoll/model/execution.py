"""One placement of a request to run something, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

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


RESULT_STATUS = {
    ExecutionStatus.COMPLETED: "success",
    ExecutionStatus.FAILED: "failed",
    ExecutionStatus.TIMEOUT: "timeout",
    ExecutionStatus.CRASHED: "error",
    ExecutionStatus.CANCELLED: "error",
}
"""The word that a result uses for each final status."""


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
    outcome: Outcome | None = None
    """Set when the status is final."""
    holder: str | None = None
    """The replica that sees to it until it ends."""
    kept: dict[str, str] = field(default_factory=dict)
    """Parts that are too large for a row, by name, and where they are in the blob store."""
    version: int = 1
