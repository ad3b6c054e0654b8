"""
Executions and their results.

The bodies of `execute`, `submitted_out` and `result_out`, are written by hand because it is the hot
path; a test compares them with their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from atoll.api.rest import path_encoding
from atoll.api.rest.schemas.base import (
    GIVEN,
    From,
    Page,
    ResponseBody,
    Stale,
    encoder_of,
    timestamp,
)
from atoll.api.rest.schemas.files import PathFields
from atoll.model.execution import (
    RESULT_STATUS,
    Artifact,
    Attempt,
    Execution,
    ExecutionStatus,
    Outcome,
)
from atoll.service.executions.displays import display_of
from atoll.service.executions.event_log import lines_of
from atoll.service.executions.offload import shortened

Link = Callable[[str], str]
"""The URL from which the file of a path is downloaded."""
Status = Literal["pending", "running", "completed", "failed", "timeout", "crashed", "cancelled"]


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
    return [shown for line in lines_of(outcome) if (shown := display_of(line)) is not None]


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
