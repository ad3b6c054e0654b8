"""
The wire: what requests may say and what answers look like.

Requests are checked by pydantic here; answers are written straight from the model by the functions
below, one a noun, because validating our own output again would cost more than the request itself.
The answer classes exist for OpenAPI and are held to the functions by a test.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from atoll.model.execution import RESULT_STATUS, Language
from atoll.model.resources import Resources, format_cpu, format_size, parse_cpu, parse_size
from atoll.model.template import REQUIREMENTS

if TYPE_CHECKING:
    from atoll.model.execution import Artifact, Execution, Outcome
    from atoll.model.session import Session
    from atoll.model.template import Template

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=256)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Argument = Annotated[str, StringConstraints(max_length=131_071, pattern=r"^[^\x00]*$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResourcesIn(Wire):
    """Limits. What is left out comes from the template."""

    cpu: str | None = Field(None, examples=["1", "0.5", "500m"])
    memory: str | None = Field(None, examples=["512Mi"])
    disk: str | None = Field(None, examples=["1Gi"])
    max_processes: int | None = Field(None, ge=4, le=32_768)

    def over(self, base: Resources) -> Resources:
        """These limits where given, `base` elsewhere."""
        return Resources(
            cpu=base.cpu if self.cpu is None else parse_cpu(self.cpu),
            memory=base.memory if self.memory is None else parse_size(self.memory, "memory"),
            disk=base.disk if self.disk is None else parse_size(self.disk, "disk"),
            max_processes=self.max_processes or base.max_processes,
        )


class CreateSession(ResourcesIn):
    template_id: Name | None = None
    timeout: int | None = Field(None, ge=1, description="Seconds of life.")
    env_vars: Env = {}
    resources: ResourcesIn | None = Field(None, description="The four limits, as one object.")

    @model_validator(mode="after")
    def _limits_once(self) -> CreateSession:
        flat = {"cpu", "memory", "disk", "max_processes"} & self.model_fields_set
        if self.resources is not None and flat:
            raise ValueError(f"give {', '.join(sorted(flat))} or resources, not both")
        return self

    def limits(self, base: Resources) -> Resources:
        return (self.resources or self).over(base)


class Execute(Wire):
    """`code` (in `language`) or `command`, one of the two."""

    code: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    language: Language = Language.PYTHON
    command: Annotated[list[Argument], Field(min_length=1, max_length=1024)] | None = None
    timeout: float | None = Field(None, gt=0, description="Seconds.")
    event: Any = Field(default_factory=dict, description="Given to `handler`.")
    stdin: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    env: Env = {}
    args: Annotated[list[Argument], Field(max_length=1024)] = []
    cwd: Path | None = Field(None, description="Beneath /workspace, which is the default.")
    wait: float | None = Field(
        None,
        ge=0,
        description="Seconds to wait: the answer is the result itself if it comes in time.",
    )

    @field_validator("event")
    @classmethod
    def _is_json(cls, event: Any) -> Any:
        if event:
            # The parser takes NaN and Infinity, which JSON does not have.
            json.dumps(event, allow_nan=False)
        return event

    @model_validator(mode="after")
    def _one_of_two(self) -> Execute:
        if (self.code is None) == (self.command is None):
            raise ValueError("give code or command, one of the two")
        return self


class Mkdir(Wire):
    path: Path
    parents: bool = True


class Move(Wire):
    source: Path
    target: Path
    overwrite: bool = False


class SecurityContext(Wire):
    require: list[Literal[tuple(REQUIREMENTS)]] = []  # type: ignore[valid-type]


class TemplateIn(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    image: str = Field("", max_length=4096, description="Root file system directory on the node.")
    base_image: str = Field("", max_length=4096)
    pre_installed_packages: Annotated[list[str], Field(max_length=1000)] = []
    default_resources: ResourcesIn = ResourcesIn()
    security_context: SecurityContext = SecurityContext()
    python: str = Field(
        "", max_length=4096, description="Interpreter; a virtual environment's works."
    )
    preload: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,254}$")]],
        Field(max_length=100),
    ] = []
    env: Env = {}
    pool_size: int = Field(0, ge=0, description="Ready instances to keep.")


class CreateTemplate(TemplateIn):
    id: Name | None = None


# Answers


class ResourcesOut(BaseModel):
    cpu: str
    memory: str
    disk: str
    max_processes: int


class SessionOut(BaseModel):
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


class ResultOut(BaseModel):
    execution_id: str
    status: Literal["success", "failed", "timeout", "error"]
    stdout: str
    stderr: str
    exit_code: int | None
    execution_time: float
    return_value: Any
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


class StatusOut(BaseModel):
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


class ExecutionOut(BaseModel):
    id: str
    session_id: str
    container_id: str | None
    code: str | None
    language: str | None
    command: list[str] | None
    timeout: float
    status: Literal["pending", "running", "completed", "failed", "timeout", "crashed", "cancelled"]
    cause: str | None
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None
    execution_time: float | None
    return_value: Any
    metrics: MetricsOut | None
    artifacts: list[ArtifactOut]
    error: ErrorOut | None
    stdout_truncated: bool
    stdout_bytes: int
    stderr_truncated: bool
    stderr_bytes: int
    artifacts_truncated: bool
    retry_count: int
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None


class ExecutionPage(BaseModel):
    items: list[ExecutionOut]
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


_NO_OUTCOME: dict[str, Any] = {
    "stdout": "",
    "stderr": "",
    "exit_code": None,
    "execution_time": None,
    "return_value": None,
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


def result_out(execution: Execution, outcome: Outcome) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "status": RESULT_STATUS[outcome.status],
        **_outcome_out(outcome),
        "artifacts": [artifact.path for artifact in outcome.artifacts],
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


def execution_out(execution: Execution) -> dict[str, Any]:
    request, outcome = execution.request, execution.outcome
    return {
        "id": execution.id,
        "session_id": execution.session_id,
        "container_id": execution.instance_id,
        "code": request.code,
        "language": request.language,
        "command": None if request.command is None else list(request.command),
        "timeout": request.timeout,
        "status": execution.status,
        **(_NO_OUTCOME if outcome is None else _outcome_out(outcome)),
        "artifacts": [] if outcome is None else [artifact_out(a) for a in outcome.artifacts],
        "retry_count": execution.retry_count,
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
