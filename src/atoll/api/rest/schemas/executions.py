"""
Executions: what to run, and what came of it.

The bodies of `execute`, `submitted_out` and `result_out`, are written by hand because it is the hot
path; a test compares them with their schemas.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from atoll.api.rest import path_encoding
from atoll.api.rest.schemas.base import (
    GIVEN,
    From,
    Page,
    RequestBody,
    ResponseBody,
    Stale,
    encoder_of,
    timestamp,
)
from atoll.api.rest.schemas.files import PathFields
from atoll.api.rest.schemas.types import Argument, Base64, Env, Id, Json, Path, Reason
from atoll.model.execution import (
    RESULT_STATUS,
    Artifact,
    Attempt,
    Execution,
    ExecutionStatus,
    Language,
    Mode,
    Outcome,
    Request,
)
from atoll.service.executions.event_log import lines_of
from atoll.service.executions.mime import shaped
from atoll.service.executions.offload import shortened

MAX_SOURCE = 4 * 1024 * 1024
"""Characters of code, and of stdin given with it."""
MAX_APPROVAL_ANSWER = 32 * 1024
"""Bytes as JSON. The event log has an entry with each answer."""
MAX_STDIN = 1024 * 1024
"""Bytes that an executor accepts at once."""
MAX_MESSAGE = 64 * 1024
"""Bytes that an executor accepts at once."""

Link = Callable[[str], str]
"""The URL from which the file of a path is downloaded."""
Status = Literal["pending", "running", "completed", "failed", "timeout", "crashed", "cancelled"]


# Requests


class Work(RequestBody):
    """What to run: `code` (in `language`) or `command`."""

    code: Annotated[str, StringConstraints(max_length=MAX_SOURCE)] | None = None
    language: Language = Language.PYTHON
    command: Annotated[list[Argument], Field(min_length=1, max_length=1024)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=MAX_SOURCE)] | None = None
    stdin_open: bool = Field(
        False, description="Keep stdin open after `stdin`, for input that is injected later."
    )
    env: Env = Field({})
    args: Annotated[list[Argument], Field(max_length=1024)] = Field([])
    cwd: Path | None = Field(
        None,
        description="Working directory: relative to /workspace, which is the default, or an "
        "absolute path in the session.",
    )
    execution_id: Id | None = Field(
        None, description="An id of your own. A repeated request with it does not run again."
    )
    context_id: Id | None = Field(None, description="The stateful context to run the code in.")

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: list[str] | None) -> list[str] | None:
        if command is not None and not command[0]:
            raise ValueError("the first item is the program and cannot be empty")
        return command

    @model_validator(mode="after")
    def _context_runs_code(self) -> Self:
        if self.context_id is not None and self.code is None:
            raise ValueError("context_id: a context runs code, not a command")
        return self

    def _request(self, **more: Any) -> Request:
        return Request(
            code=self.code,
            language=self.language if self.command is None else None,
            command=None if self.command is None else tuple(self.command),
            stdin_open=self.stdin_open,
            args=tuple(self.args),
            env=self.env,
            cwd=self.cwd,
            context_id=self.context_id,
            **more,
        )


class Execute(Work):
    """Either `code` (in `language`) or `command`."""

    timeout: float | None = Field(None, gt=0, description="Seconds.")
    event: Json = Field(default_factory=dict, description="Argument of `handler`.")
    wait: float | None = Field(
        None,
        ge=0,
        description="Seconds to wait for the result, which is then the response.",
    )

    @model_validator(mode="after")
    def _code_or_command(self) -> Self:
        if (self.code is None) == (self.command is None):
            raise ValueError("code: give either code or command")
        return self

    def request(self, default_timeout: float) -> Request:
        return self._request(
            event=self.event,
            stdin=self.stdin,
            timeout=self.timeout or default_timeout,
            mode=Mode.SYNC if self.wait else Mode.ASYNC,
        )


class Cancel(RequestBody):
    reason: Reason | None = None


class Inject(RequestBody):
    """Either a `message`, which the code reads with `messages()`, or more input for its stdin."""

    message: Annotated[str, StringConstraints(max_length=MAX_MESSAGE)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=MAX_STDIN)] | None = None
    stdin_base64: (
        Annotated[str, StringConstraints(max_length=-(-MAX_STDIN // 3) * 4), Base64] | None
    ) = None
    eof: bool = Field(False, description="Close stdin afterwards.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.message, self.stdin, self.stdin_base64]
        count = sum(value is not None for value in given)
        if count > 1 or (count == 0 and not self.eof):
            raise ValueError("message: give exactly one of message, stdin and stdin_base64")
        if self.message is not None and self.eof:
            raise ValueError("eof: a message does not close stdin")
        if self._size(self.message) > MAX_MESSAGE:
            raise ValueError(f"message: at most {MAX_MESSAGE} bytes")
        if self._size(self.stdin) > MAX_STDIN:
            raise ValueError(f"stdin: at most {MAX_STDIN} bytes in one request")
        return self

    @staticmethod
    def _size(text: str | None) -> int:
        return 0 if text is None else len(text.encode("utf-8", "surrogatepass"))

    @property
    def data(self) -> str:
        """The input for stdin, as base64."""
        if self.stdin_base64 is not None:
            return self.stdin_base64
        return base64.b64encode((self.stdin or "").encode("utf-8", "surrogatepass")).decode()


class Resume(RequestBody):
    """A person's answer to the question that the execution asks."""

    approved: bool
    answer: Any = None
    reason: Reason | None = None
    approval_id: Id | None = Field(
        None, description="Which question is answered; refused if another one is open."
    )

    @field_validator("answer")
    @classmethod
    def _is_short_json(cls, answer: Any) -> Any:
        if len(json.dumps(answer, allow_nan=False)) > MAX_APPROVAL_ANSWER:
            raise ValueError(f"at most {MAX_APPROVAL_ANSWER} bytes of JSON")
        return answer


# Responses


class Submitted(ResponseBody):
    execution_id: str
    invocation_id: str | None
    status: Literal["submitted"]
    submitted_at: datetime


def submitted_out(execution: Execution) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "invocation_id": execution.invocation_id,
        "status": "submitted",
        "submitted_at": timestamp(execution.created_at),
    }


class ErrorOut(ResponseBody):
    code: str
    message: str
    name: str | None = None
    traceback: str | None = None


class MetricsOut(ResponseBody):
    duration_ms: float
    cpu_time_ms: float
    peak_memory_mb: float
    bytes_read: int
    bytes_written: int


class DisplayOut(ResponseBody):
    """Something that code in a context displayed, in all representations that it has."""

    type: Literal["display", "result"]
    data: dict[str, Any] = Field(description="By MIME type; binary data as base64.")
    metadata: dict[str, Any]


class OutcomeFields(Stale):
    """What results and executions have in common."""

    stdout: str
    stderr: str
    exit_code: int | None
    return_value: Any
    results: list[DisplayOut]
    metrics: MetricsOut | None
    cause: str | None
    signal: str | None
    error: ErrorOut | None
    stdout_truncated: bool
    stdout_bytes: int
    stderr_truncated: bool
    stderr_bytes: int
    artifacts_truncated: bool
    shortened: list[str] = Field(
        description="Fields that are cut short or empty here because they are large. "
        "`GET executions/{id}` returns them complete, unless they were lost."
    )


class ResultOut(OutcomeFields):
    execution_id: str
    status: Literal["success", "failed", "timeout", "error"]
    execution_time: float
    artifacts: list[str]


_NAMES = {
    "stdout": "stdout",
    "stderr": "stderr",
    "return_json": "return_value",
    "results_json": "results",
}
"""Names of the parts of an outcome that may be cut short."""


def result_out(execution: Execution, outcome: Outcome) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "status": RESULT_STATUS[outcome.status],
        **_outcome_out(outcome),
        "artifacts": [path_encoding.readable(artifact.path) for artifact in outcome.artifacts],
        "shortened": [name for name in _shortened(execution) if name in _NAMES.values()],
    }


def _outcome_out(outcome: Outcome) -> dict[str, Any]:
    return {
        "stdout": outcome.stdout.decode("utf-8", "replace"),
        "stderr": outcome.stderr.decode("utf-8", "replace"),
        "exit_code": outcome.exit_code,
        "execution_time": outcome.execution_time,
        "return_value": None if outcome.return_json is None else json.loads(outcome.return_json),
        "results": _results(outcome),
        "metrics": outcome.metrics or None,
        "cause": outcome.cause,
        "signal": outcome.signal,
        "error": outcome.error,
        "stdout_truncated": outcome.stdout_size > len(outcome.stdout),
        "stdout_bytes": outcome.stdout_size,
        "stderr_truncated": outcome.stderr_size > len(outcome.stderr),
        "stderr_bytes": outcome.stderr_size,
        "artifacts_truncated": outcome.artifacts_truncated,
    }


def _results(outcome: Outcome) -> list[dict[str, Any]]:
    if outcome.results_json is None:
        return []
    return [shown for line in lines_of(outcome) if (shown := shaped(line)) is not None]


_NO_OUTCOME = {
    **_outcome_out(Outcome(ExecutionStatus.PENDING, cause=None, exit_code=None)),
    "execution_time": None,
}


def _shortened(execution: Execution) -> list[str]:
    if not execution.kept:
        return []
    given = "command" if execution.request.code is None else "code"
    return [_NAMES.get(part, given) for part in shortened(execution)]


class StatusOut(Stale, of=Execution):
    execution_id: Annotated[str, From("id")]
    session_id: str
    status: Status
    cause: Annotated[
        str | None, From(lambda execution: execution.outcome and execution.outcome.cause)
    ]
    created_at: datetime
    completed_at: datetime | None


status_out = encoder_of(StatusOut)


class ArtifactOut(PathFields, of=Artifact):
    size: int
    mime_type: str
    type: Literal["artifact", "log", "output"]
    created_at: datetime
    checksum: str | None
    download_url: Annotated[str | None, GIVEN] = Field(
        description="A link that needs no API key and is valid for one hour. Null in lists of "
        "executions."
    )


class SessionArtifactOut(ArtifactOut):
    execution_id: str = Field(description="The last execution that created or changed it.")


class ArtifactPage(Page[SessionArtifactOut]):
    pass


_encode_artifact = encoder_of(ArtifactOut)


def artifact_out(artifact: Artifact, link: Link | None = None) -> dict[str, Any]:
    url = None if link is None else link(artifact.path)
    return _encode_artifact(artifact, download_url=url)


class AttemptOut(ResponseBody, of=Attempt):
    started_at: datetime
    ended_at: datetime
    node_id: str
    container_id: Annotated[str | None, From("instance_id")]
    cause: str | None
    message: str | None


class ApprovalOut(ResponseBody):
    id: str
    question: str
    data: Any
    timeout: float = Field(description="Seconds that the question stays open in all.")


class ExecutionOut(OutcomeFields, of=Execution):
    id: str
    invocation_id: str | None
    session_id: str
    container_id: Annotated[str | None, From("instance_id")]
    code: Annotated[str | None, From("request.code")]
    language: Annotated[str | None, From("request.language")]
    command: Annotated[list[str] | None, From("request.command")]
    function_name: Annotated[str | None, From("request.function_name")]
    context_id: Annotated[str | None, From("request.context_id")]
    timeout: Annotated[float, From("request.timeout")]
    status: Status
    execution_time: Annotated[float | None, GIVEN]
    artifacts: Annotated[list[ArtifactOut], GIVEN]
    retry_count: int
    attempts: list[AttemptOut]
    approval: Annotated[ApprovalOut | None, GIVEN] = Field(
        description="The question that it waits for an answer to."
    )
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class ExecutionPage(Page[ExecutionOut]):
    pass


_encode_execution = encoder_of(ExecutionOut, given=OutcomeFields)


def execution_out(
    execution: Execution, approval: dict[str, Any] | None = None, link: Link | None = None
) -> dict[str, Any]:
    outcome = execution.outcome
    question = approval and {name: approval.get(name) for name in ApprovalOut.model_fields}
    return _encode_execution(
        execution,
        **(_NO_OUTCOME if outcome is None else _outcome_out(outcome)),
        artifacts=[] if outcome is None else [artifact_out(a, link) for a in outcome.artifacts],
        shortened=_shortened(execution),
        approval=question,
    )
