"""Executions and invocations: their state, results, approvals and artifacts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations
from typing import Any, Literal

from atoll.errors import AtollError
from atoll.sdk.displays import Display, preformatted

_TAIL = 20
_SHORT = 80


def short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Metrics:
    duration_ms: float
    cpu_time_ms: float
    peak_memory_mb: float
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why an execution failed. `name` and `traceback` are those of a Python exception."""

    code: str
    message: str
    name: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of an execution, with its output."""

    execution_id: str
    status: Literal["success", "failed", "timeout", "error"]
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    execution_time: float = 0.0
    return_value: Any = None
    """Return value of `handler(event)`, or of the invoked function."""
    results: tuple[Display, ...] = ()
    """What a context displayed, in order."""
    metrics: Metrics | None = None
    artifacts: tuple[str, ...] = ()
    """Files that this execution created or changed, relative to the workspace."""
    cause: str | None = None
    signal: str | None = None
    error: ErrorInfo | None = None
    stdout_truncated: bool = False
    stdout_bytes: int = 0
    stderr_truncated: bool = False
    stderr_bytes: int = 0
    artifacts_truncated: bool = False
    shortened: tuple[str, ...] = ()
    """Fields of which the server has only the beginning."""

    @property
    def ok(self) -> bool:
        return self.status == "success"

    def check(self) -> Result:
        """Return this result, or raise `ExecutionFailed` unless it is a success."""
        if not self.ok:
            raise ExecutionFailed(self)
        return self

    def __repr__(self) -> str:
        parts = [f"exit code {self.exit_code}"] if self.exit_code else []
        if self.error is not None:
            name = self.error.name or self.error.code
            parts.append(f"error={short(repr(f'{name}: {self.error.message}'))}")
        parts += [
            f"{name}={short(repr(value))}"
            for name, value in (("stdout", self.stdout), ("stderr", self.stderr))
            if value
        ]
        if self.return_value is not None:
            parts.append(f"return_value={short(repr(self.return_value))}")
        if self.results:
            parts.append(f"results={short(repr(list(self.results)))}")
        if self.artifacts:
            parts.append(f"artifacts={short(repr(list(self.artifacts)))}")
        return f"<Result {', '.join([f'{self.status} in {self.execution_time:.3g} s', *parts])}>"

    def _repr_html_(self) -> str:
        """Cell output of a notebook: stdout, stderr, displays, return value and error."""
        parts = [preformatted(self.stdout), preformatted(self.stderr, "color:#b00")]
        parts += [display._repr_html_() for display in self.results]
        if self.return_value is not None:
            parts.append(preformatted(repr(self.return_value)))
        if self.error is not None:
            error = self.error.traceback or f"{self.error.code}: {self.error.message}"
            if error.strip() not in self.stderr:
                parts.append(preformatted(error, "color:#b00"))
        return "".join(parts) or preformatted(repr(self))


class ExecutionFailed(AtollError):
    """Raised for an execution that did not succeed; `result` has the details."""

    code = "execution_failed"

    def __init__(self, result: Result) -> None:
        details = [f"cause: {result.cause}"] if result.cause else []
        if result.signal:
            details.append(f"signal: {result.signal}")
        elif result.exit_code is not None:
            details.append(f"exit code: {result.exit_code}")
        text = f"Execution {result.execution_id} ended with status {result.status}"
        text += f" ({', '.join(details)})" if details else ""
        text += f": {result.error.message}" if result.error else ""
        tail = result.stderr.rstrip().splitlines()[-_TAIL:]
        super().__init__("\n".join([text, *tail]))
        self.result = result

    def __reduce__(self) -> tuple[type[ExecutionFailed], tuple[Result]]:
        return (type(self), (self.result,))


@dataclass(frozen=True, slots=True)
class Status:
    """The status of an execution."""

    execution_id: str
    session_id: str
    status: str
    """pending, running, completed, failed, timeout, crashed or cancelled."""
    created_at: datetime
    cause: str | None = None
    completed_at: datetime | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("pending", "running")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An ended attempt of an execution. `cause` is None if it completed."""

    started_at: datetime
    ended_at: datetime
    node_id: str
    container_id: str | None = None
    cause: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an approval: yes or no, with a JSON value or a reason."""

    approved: bool
    answer: Any = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.approved


@dataclass(frozen=True, slots=True)
class Approval:
    """A question of running code to a person. Treat its text as untrusted: the code wrote it."""

    id: str = ""
    question: str = ""
    data: Any = None
    timeout: float | None = None
    """Seconds after which the question counts as refused."""
    state: str = "asked"
    """
    asked, answered or refused. Each question has two events: when it is asked, and when it is
    answered or refused. The second is missing if the session ends first.
    """
    approved: bool | None = None
    answer: Any = None
    reason: str | None = None
    """Why it was refused: timeout, cancelled, shutdown, or the text of the person."""

    @property
    def asked(self) -> bool:
        return self.state == "asked"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that an execution created or changed."""

    path: str
    size: int
    mime_type: str
    type: str
    created_at: datetime
    checksum: str | None = None
    """SHA-256; None for very large files."""
    download_url: str | None = None
    """Link that works without a key for an hour; None in lists of executions."""
    execution_id: str | None = None
    """In the list of a session: the latest execution that created or changed the file."""


@dataclass(frozen=True, slots=True, repr=False)
class ExecutionInfo:
    """The record of an execution."""

    id: str
    session_id: str
    status: str
    timeout: float
    created_at: datetime
    invocation_id: str | None = None
    code: str | None = None
    language: str | None = None
    command: tuple[str, ...] | None = None
    function_name: str | None = None
    container_id: str | None = None
    cause: str | None = None
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: str | None = None
    execution_time: float | None = None
    return_value: Any = None
    results: tuple[Display, ...] = ()
    metrics: Metrics | None = None
    artifacts: tuple[Artifact, ...] = ()
    error: ErrorInfo | None = None
    stdout_truncated: bool = False
    stdout_bytes: int = 0
    stderr_truncated: bool = False
    stderr_bytes: int = 0
    artifacts_truncated: bool = False
    shortened: tuple[str, ...] = ()
    """Fields that are shortened in lists. Get the execution by id for their full values."""
    retry_count: int = 0
    attempts: tuple[Attempt, ...] = ()
    """Ended attempts, in order."""
    approval: Approval | None = None
    """The question that it waits on."""
    stale: bool = False
    """True if the server's database is unavailable and this is the last known state."""
    started_at: datetime | None = None
    completed_at: datetime | None = None

    def __repr__(self) -> str:
        program = repr(self.code if self.code is not None else list(self.command or ()))
        return f"<ExecutionInfo {self.id} {self.status} in {self.session_id}: {short(program)}>"


@dataclass(frozen=True, slots=True)
class InvocationInfo:
    """An invocation as the server returned it."""

    invocation_id: str
    execution_id: str
    """The latest execution."""
    session_id: str
    mode: str
    status: str
    """accepted, running, succeeded, failed or cancelled."""
    created_at: datetime
    function_name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    completed_at: datetime | None = None
    result: Result | None = None
    """Result of the latest execution; None in lists and before the end."""
    console_url: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("accepted", "running")
