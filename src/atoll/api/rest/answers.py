"""
What answers look like.

They are written straight from the model by the functions below, one a noun, because validating our
own output again would cost more than the request itself. The classes exist for OpenAPI and are held
to the functions by a test.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from atoll.model.execution import RESULT_STATUS
from atoll.model.invocation import Mode
from atoll.model.resources import format_cpu, format_size
from atoll.service.bulk import shortened
from atoll.service.displays import shaped
from atoll.service.story import lines_of

if TYPE_CHECKING:
    from atoll.model.execution import Artifact, Attempt, Execution, Outcome
    from atoll.model.invocation import Invocation
    from atoll.model.resources import Resources
    from atoll.model.session import Session
    from atoll.model.template import Template

_SHORTENED = "Fields of which only the beginning is here, or nothing."


class ResourcesOut(BaseModel):
    cpu: str
    memory: str
    disk: str
    max_processes: int


class Stale(BaseModel):
    """What may come from memory while the database is away."""

    stale: bool = Field(
        False, description="Only there, and true, when the database is away: what was known last."
    )


class SessionOut(Stale):
    id: str
    template_id: str
    status: Literal["creating", "running", "completed", "failed", "timeout", "terminated"]
    wanted: Literal["running", "destroyed"]
    runtime_type: str
    runtime_node: str
    container_id: str | None = Field(description="The instance, by whatever driver.")
    pod_name: str | None
    resources: ResourcesOut
    env_vars: dict[str, str]
    timeout: int
    capacity: int = Field(description="Executions at the same time.")
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cause: str | None
    message: str | None


class SessionPage(BaseModel):
    items: list[SessionOut]
    next_cursor: str | None


class ProcessOut(BaseModel):
    pid: int = Field(description="As the session sees it.")
    execution_id: str
    name: str


class ProcessPage(BaseModel):
    items: list[ProcessOut]
    next_cursor: str | None


class Submitted(BaseModel):
    execution_id: str
    invocation_id: str | None
    status: Literal["submitted"]
    submitted_at: datetime


class ErrorOut(BaseModel):
    code: str
    message: str
    name: str | None = None
    traceback: str | None = None


class MetricsOut(BaseModel):
    duration_ms: float
    cpu_time_ms: float
    peak_memory_mb: float
    bytes_read: int
    bytes_written: int


class DisplayOut(BaseModel):
    """Something that a context showed, in all the forms it has."""

    type: Literal["display", "result"]
    data: dict[str, Any] = Field(description="By MIME type; binary ones as base64.")
    metadata: dict[str, Any]


class AttemptOut(BaseModel):
    started_at: datetime
    ended_at: datetime
    node_id: str
    container_id: str | None
    cause: str | None
    message: str | None


class ApprovalOut(BaseModel):
    id: str
    question: str
    data: Any
    timeout: float = Field(description="Seconds that it waits in all.")


class ContextOut(BaseModel):
    id: str
    session_id: str
    language: str
    cwd: str
    state: Literal["idle", "busy", "dead"]
    created_at: datetime
    execution_count: int = Field(description="Executions since it was started.")


class ContextPage(BaseModel):
    items: list[ContextOut]
    next_cursor: str | None


class ResultOut(Stale):
    execution_id: str
    status: Literal["success", "failed", "timeout", "error"]
    stdout: str
    stderr: str
    exit_code: int | None
    execution_time: float
    return_value: Any
    results: list[DisplayOut]
    metrics: MetricsOut | None
    artifacts: list[str]
    cause: str | None
    signal: str | None
    error: ErrorOut | None
    stdout_truncated: bool
    stdout_bytes: int
    stderr_truncated: bool
    stderr_bytes: int
    artifacts_truncated: bool
    shortened: list[str] = Field(description=f"{_SHORTENED} Empty unless the rest was lost.")


class StatusOut(Stale):
    execution_id: str
    session_id: str
    status: Literal["pending", "running", "completed", "failed", "timeout", "crashed", "cancelled"]
    cause: str | None
    created_at: datetime
    completed_at: datetime | None


class ArtifactOut(BaseModel):
    path: str
    size: int
    mime_type: str
    type: Literal["artifact", "log", "output"]
    created_at: datetime
    checksum: str | None = Field(description="SHA-256.")
    download_url: str | None


class ExecutionOut(Stale):
    id: str
    invocation_id: str | None
    session_id: str
    container_id: str | None
    code: str | None
    language: str | None
    command: list[str] | None
    function_name: str | None
    context_id: str | None
    timeout: float
    status: Literal["pending", "running", "completed", "failed", "timeout", "crashed", "cancelled"]
    cause: str | None
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None
    execution_time: float | None
    return_value: Any
    results: list[DisplayOut]
    metrics: MetricsOut | None
    artifacts: list[ArtifactOut]
    error: ErrorOut | None
    stdout_truncated: bool
    stdout_bytes: int
    stderr_truncated: bool
    stderr_bytes: int
    artifacts_truncated: bool
    shortened: list[str] = Field(
        description=f"{_SHORTENED} In a list: `GET executions/{{id}}` has all of them."
    )
    retry_count: int
    attempts: list[AttemptOut]
    approval: ApprovalOut | None = Field(description="What it waits to be told.")
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class ExecutionPage(BaseModel):
    items: list[ExecutionOut]
    next_cursor: str | None


class InvocationOut(BaseModel):
    invocation_id: str
    execution_id: str = Field(description="Of its executions, the latest.")
    session_id: str
    function_name: str | None
    mode: Literal["sync", "async", "stream", "console"]
    status: Literal["accepted", "running", "succeeded", "failed", "cancelled"]
    metadata: dict[str, str]
    created_at: datetime
    completed_at: datetime | None
    result: ResultOut | None
    console_url: str | None = Field(description="Where its terminal is, in mode console.")


class InvocationPage(BaseModel):
    items: list[InvocationOut]
    next_cursor: str | None


class EntryOut(BaseModel):
    """A file or directory of a workspace; `path` is relative to /workspace."""

    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str = Field(examples=["0644"])
    modified_at: datetime


class Uploaded(BaseModel):
    items: list[EntryOut]


class EntryPage(BaseModel):
    items: list[EntryOut]
    next_cursor: str | None


class TemplateOut(BaseModel):
    id: str
    name: str
    image: str
    base_image: str
    pre_installed_packages: list[str]
    default_resources: ResourcesOut
    security_context: dict[str, Any]
    python: str
    preload: list[str]
    env: dict[str, str]
    pool_size: int
    version: int
    created_at: datetime
    updated_at: datetime


class TemplatePage(BaseModel):
    items: list[TemplateOut]
    next_cursor: str | None


class RuntimeOut(BaseModel):
    id: str
    type: str
    url: str
    status: Literal["healthy", "unhealthy", "draining"]
    cpu_usage: float
    mem_usage: float
    session_count: int
    max_sessions: int | None
    cached_templates: list[str]
    last_heartbeat: datetime
    failure_count: int


class RuntimePage(BaseModel):
    items: list[RuntimeOut]
    next_cursor: str | None


class RuntimeHealth(BaseModel):
    id: str
    status: Literal["healthy", "unhealthy", "draining"]
    problem: str | None = Field(description="Why it is unhealthy.")
    checked_at: datetime
    provides: list[str]
    missing: dict[str, str]


class RuntimeMetrics(BaseModel):
    id: str
    cpu_usage: float
    cpu_count: int
    load_average: float
    mem_usage: float
    mem_total: int
    disk_free: int
    session_count: int
    pool: dict[str, int]


class Problem(BaseModel):
    """RFC 9457. `code` is stable; branch on it."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def timestamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def resources_out(resources: Resources) -> dict[str, Any]:
    return {
        "cpu": format_cpu(resources.cpu),
        "memory": format_size(resources.memory),
        "disk": format_size(resources.disk),
        "max_processes": resources.max_processes,
    }


def session_out(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "template_id": session.template_id,
        "status": session.status,
        "wanted": session.wanted,
        "runtime_type": session.runtime_type,
        "runtime_node": session.runtime_node,
        "container_id": session.instance_id,
        "pod_name": None,
        "resources": resources_out(session.resources),
        "env_vars": session.env_vars,
        "timeout": session.timeout,
        "capacity": session.capacity,
        "created_at": timestamp(session.created_at),
        "updated_at": timestamp(session.updated_at),
        "expires_at": timestamp(session.expires_at),
        "ended_at": timestamp(session.ended_at),
        "cause": session.cause,
        "message": session.message,
    }


def submitted_out(execution: Execution) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "invocation_id": execution.invocation_id,
        "status": "submitted",
        "submitted_at": timestamp(execution.created_at),
    }


def _text(data: bytes) -> str:
    """Bytes that are not UTF-8 become U+FFFD; NUL stays."""
    return data.decode("utf-8", "replace")


def _outcome_out(outcome: Outcome) -> dict[str, Any]:
    return {
        "stdout": _text(outcome.stdout),
        "stderr": _text(outcome.stderr),
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


_NO_OUTCOME: dict[str, Any] = {
    "stdout": "",
    "stderr": "",
    "exit_code": None,
    "execution_time": None,
    "return_value": None,
    "results": [],
    "metrics": None,
    "cause": None,
    "signal": None,
    "error": None,
    "stdout_truncated": False,
    "stdout_bytes": 0,
    "stderr_truncated": False,
    "stderr_bytes": 0,
    "artifacts_truncated": False,
}


_SHOWN_AS = {
    "stdout": "stdout",
    "stderr": "stderr",
    "return_json": "return_value",
    "results_json": "results",
}


def _shortened(execution: Execution) -> list[str]:
    if not execution.kept:
        return []
    given = "command" if execution.request.code is None else "code"
    return [_SHOWN_AS.get(part, given) for part in shortened(execution)]


def result_out(execution: Execution, outcome: Outcome) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "status": RESULT_STATUS[outcome.status],
        **_outcome_out(outcome),
        "artifacts": [artifact.path for artifact in outcome.artifacts],
        "shortened": [name for name in _shortened(execution) if name in _SHOWN_AS.values()],
    }


def status_out(execution: Execution) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "session_id": execution.session_id,
        "status": execution.status,
        "cause": execution.outcome.cause if execution.outcome else None,
        "created_at": timestamp(execution.created_at),
        "completed_at": timestamp(execution.completed_at),
    }


def artifact_out(artifact: Artifact) -> dict[str, Any]:
    return {
        "path": artifact.path,
        "size": artifact.size,
        "mime_type": artifact.mime_type,
        "type": artifact.type,
        "created_at": timestamp(artifact.created_at),
        "checksum": artifact.checksum,
        "download_url": None,
    }


def attempt_out(attempt: Attempt) -> dict[str, Any]:
    return {
        "started_at": timestamp(attempt.started_at),
        "ended_at": timestamp(attempt.ended_at),
        "node_id": attempt.node_id,
        "container_id": attempt.instance_id,
        "cause": attempt.cause,
        "message": attempt.message,
    }


def invocation_out(invocation: Invocation, execution: Execution | None = None) -> dict[str, Any]:
    outcome = None if execution is None else execution.outcome
    console = invocation.mode is Mode.CONSOLE
    return {
        "invocation_id": invocation.id,
        "execution_id": invocation.execution_id,
        "session_id": invocation.session_id,
        "function_name": invocation.function_name,
        "mode": invocation.mode,
        "status": invocation.status,
        "metadata": invocation.metadata,
        "created_at": timestamp(invocation.created_at),
        "completed_at": timestamp(invocation.completed_at),
        "result": None if execution is None or outcome is None else result_out(execution, outcome),
        "console_url": f"/api/v1/executions/{invocation.execution_id}/console" if console else None,
    }


def execution_out(execution: Execution, approval: dict[str, Any] | None = None) -> dict[str, Any]:
    request, outcome = execution.request, execution.outcome
    return {
        "id": execution.id,
        "invocation_id": execution.invocation_id,
        "session_id": execution.session_id,
        "container_id": execution.instance_id,
        "code": request.code,
        "language": request.language,
        "command": None if request.command is None else list(request.command),
        "function_name": request.function_name,
        "context_id": request.context_id,
        "timeout": request.timeout,
        "status": execution.status,
        **(_NO_OUTCOME if outcome is None else _outcome_out(outcome)),
        "artifacts": [] if outcome is None else [artifact_out(a) for a in outcome.artifacts],
        "shortened": _shortened(execution),
        "retry_count": execution.retry_count,
        "attempts": [attempt_out(attempt) for attempt in execution.attempts],
        "approval": None
        if approval is None
        else {name: approval.get(name) for name in ("id", "question", "data", "timeout")},
        "created_at": timestamp(execution.created_at),
        "started_at": timestamp(execution.started_at),
        "completed_at": timestamp(execution.completed_at),
    }


def template_out(template: Template) -> dict[str, Any]:
    return {
        "id": template.id,
        "name": template.name,
        "image": template.image,
        "base_image": template.base_image,
        "pre_installed_packages": list(template.pre_installed_packages),
        "default_resources": resources_out(template.default_resources),
        "security_context": {"require": list(template.require)},
        "python": template.python,
        "preload": list(template.preload),
        "env": template.env,
        "pool_size": template.pool_size,
        "version": template.version,
        "created_at": timestamp(template.created_at),
        "updated_at": timestamp(template.updated_at),
    }
