"""
The shapes of answers, for OpenAPI. The functions of `answers` write them; a test holds the two to
each other.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from atoll.model.demand import Limit
from atoll.model.plan import Observed
from atoll.model.session import SessionStatus, Wanted
from atoll.model.template import TemplateStatus

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


class VolumeMountOut(BaseModel):
    volume_id: str
    path: str
    read_only: bool


class InstallOut(BaseModel):
    """Python packages of a session's own, and how far they are."""

    status: Literal["installing", "installed", "failed"]
    requested: list[str]
    installed: list[str] = Field(description="As `name==version`, once they are installed.")
    message: str | None


class WarningOut(BaseModel):
    code: str
    message: str


class SessionOut(Stale):
    id: str
    template_id: str
    status: SessionStatus
    wanted: Wanted
    observed: Observed = Field(description="The status, with all ends as one.")
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
    expires_at: datetime | None = Field(
        description="When its life is over; none while it is stopped or archived."
    )
    ended_at: datetime | None
    cause: str | None
    message: str | None
    template_version: int
    secrets: list[str] = Field(description="Their names.")
    volumes: list[VolumeMountOut]
    workspace_mode: Literal["sync", "mount"]
    durability: Literal["background", "execution"]
    started_from: str | None
    dependencies: InstallOut | None = Field(description="None when it asked for none.")
    warnings: list[WarningOut] = Field(description="What is weaker than asked for.")
    labels: dict[str, str]
    node_labels: dict[str, str] = Field(description="Labels that its node must have.")
    auto_start: bool = Field(description="Whether a request that needs it starts it.")
    idle_timeout: int | None = Field(description="Seconds without requests until it is stopped.")
    archive_after: int | None = Field(description="Seconds at rest until it is archived.")
    delete_after: int | None = Field(description="Seconds at rest until it ends.")
    active_at: datetime | None = Field(description="When something was last asked of it.")
    rested_at: datetime | None = Field(description="Since when it is stopped or archived.")
    failures: int = Field(description="How often in a row it could not become what is wanted.")
    retry_at: datetime | None = Field(description="When that is tried again.")


class CheckpointOut(BaseModel):
    session_id: str
    number: int = Field(description="One more each time that something had changed.")
    created_at: datetime
    files: int
    size: int = Field(description="Bytes of all files together.")
    kept_until: datetime | None = Field(description="None while the session lives.")


class SessionPage(BaseModel):
    items: list[SessionOut]
    next_cursor: str | None


class SecretNames(BaseModel):
    """Values are never shown."""

    items: list[str]
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
    path: str = Field(description="What is not UTF-8 in it is U+FFFD.")
    encoded_path: str = Field(description="Percent-encoded, every byte of it; fit for a URL.")
    size: int
    mime_type: str
    type: Literal["artifact", "log", "output"]
    created_at: datetime
    checksum: str | None = Field(description="SHA-256.")
    download_url: str | None = Field(
        description="A link that needs no key and is good for an hour. None in lists of executions."
    )


class SessionArtifactOut(ArtifactOut):
    execution_id: str = Field(description="The last one that made or changed it.")


class ArtifactPage(BaseModel):
    items: list[SessionArtifactOut]
    next_cursor: str | None


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

    path: str = Field(description="What is not UTF-8 in it is U+FFFD.")
    encoded_path: str = Field(description="Percent-encoded, every byte of it; fit for a URL.")
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str = Field(examples=["0644"])
    modified_at: datetime
    etag: str | None = Field(description="Of a file, as in its `ETag` header.")


class MatchOut(BaseModel):
    path: str
    encoded_path: str
    line: int = Field(description="From 1.")
    column: int = Field(description="From 1, in characters.")
    text: str = Field(description="The line, or 400 characters of it around the match.")


class MatchPage(BaseModel):
    items: list[MatchOut]
    next_cursor: str | None = Field(
        description="There may be more, even if this page is not full: time was over."
    )


class Unpacked(BaseModel):
    path: str
    entries: int


class LinkOut(BaseModel):
    url: str
    method: Literal["GET", "PUT"]
    expires_at: datetime
    native: bool = Field(description="Whether it leads straight to the blob store.")
    complete_url: str | None = Field(description="To POST to after a native PUT.")


class Uploaded(BaseModel):
    items: list[EntryOut]


class EntryPage(BaseModel):
    items: list[EntryOut]
    next_cursor: str | None


class RegistryOut(BaseModel):
    """That there are credentials, and for whom."""

    server: str


class BuildContextOut(BaseModel):
    digest: str = Field(description="Its SHA-256, by which a template names it.")
    size: int = Field(description="Bytes.")


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
    pool_max: int | None
    debian_packages: list[str]
    python_packages: list[str]
    installed_packages: list[str]
    runtime: str
    dockerfile: str | None
    build_context: str | None
    registry: RegistryOut | None = Field(description="That there are credentials; never they.")
    image_digest: str | None = Field(
        description="Of the image in its registry, once it was pulled."
    )
    entrypoint: list[str] | None = Field(
        description="The image's own, once it is known. What runs is Atoll's executor."
    )
    command: list[str] | None = Field(description="The same of its CMD.")
    version: int
    status: TemplateStatus
    message: str | None
    attempts: int
    created_at: datetime
    updated_at: datetime


class TemplatePage(BaseModel):
    items: list[TemplateOut]
    next_cursor: str | None


class VolumeOut(BaseModel):
    id: str
    kind: Literal["local", "s3"]
    size: str | None = Field(description="None where the bucket sets the bound.")
    node_id: str | None = Field(description="The node that has it; none when all have.")
    created_at: datetime


class VolumePage(BaseModel):
    items: list[VolumeOut]
    next_cursor: str | None


class DrainOut(BaseModel):
    total: int = Field(description="Sessions that were there when it began.")
    left: int = Field(description="Those that are there still; the node is empty at 0.")
    message: str | None = Field(description="Why one of them cannot leave, if that is so.")


class NodeOut(BaseModel):
    id: str
    type: str
    url: str = Field(description="Where a control plane of it answers.")
    status: Literal["healthy", "unhealthy"]
    problem: str | None = Field(description="Why it is unhealthy.")
    cordoned: bool = Field(description="Whether it gets no new sessions.")
    drain: DrainOut | None = Field(description="How far its emptying is, once it was asked for.")
    labels: dict[str, str]
    provides: list[str] = Field(description="What a template can require of it.")
    features: list[str] = Field(description="What it can do beside.")
    missing: dict[str, str] = Field(description="What it cannot give, and why.")
    session_count: int = Field(description="Sessions with an instance.")
    max_sessions: int | None
    cpu_usage: float | None = Field(description="0 to 1 of all cores.")
    cpu_count: int | None
    load_average: float | None
    mem_usage: float | None = Field(description="0 to 1 of all memory.")
    mem_total: int | None = Field(description="Bytes.")
    disk_free: int | None = Field(description="Bytes.")
    cached_templates: list[str] = Field(description="Versions of templates, as `id@version`.")
    building_templates: list[str]
    pool: dict[str, int] = Field(description="Ready instances by template.")
    shared_blobs: bool = Field(
        description="Whether its sessions can go on elsewhere: their files are saved on S3."
    )
    last_heartbeat: datetime | None = Field(description="When it last told of itself.")
    failure_count: int = Field(description="Probes that failed in a row.")


class NodePage(BaseModel):
    items: list[NodeOut]
    next_cursor: str | None


class EventOut(BaseModel):
    number: int | None = Field(description="Its place: one more than that of the event before.")
    type: str = Field(examples=["execution.completed"])
    subject: str = Field(description="The id of what changed.")
    at: datetime
    data: dict[str, Any]


class EventPage(BaseModel):
    items: list[EventOut]
    after: int = Field(description="Where to go on, as `after` of the next request.")


class DeliveriesOut(BaseModel):
    failures: int = Field(description="Tries at the next event, all of which failed.")
    gave_up: int = Field(description="Events given up after too many tries.")
    missed: int = Field(description="Events that were no longer kept when it was their turn.")
    last_status: int | None = Field(description="Of the last answer.")
    last_error: str | None = Field(description="Why the last try failed.")
    last_at: datetime | None
    retry_at: datetime | None = Field(description="When the next event is tried again.")


class WebhookOut(BaseModel):
    id: str
    url: str
    types: list[str]
    enabled: bool
    created_at: datetime
    delivered: int = Field(description="The number of the last event that it was told of.")
    deliveries: DeliveriesOut


class NewWebhook(WebhookOut):
    secret: str | None = Field(description="If it was made here; it is not shown again.")


class WebhookList(BaseModel):
    items: list[WebhookOut]


class TriedOut(BaseModel):
    delivered: bool
    status: int | None = Field(description="Of the answer.")
    error: str | None


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


class PoolOut(BaseModel):
    template_id: str
    version: int = Field(description="Of the template.")
    ready: int
    starting: int
    others: int = Field(description="Ready ones of other control planes of the same node.")
    target: int = Field(description="How many are to be ready.")
    wanted: int = Field(description="How many would be, if the node had the memory.")
    minimum: int
    maximum: int
    rate_per_minute: float = Field(description="Creates, lately.")
    start_seconds: float | None = Field(description="What a start takes; none before the first.")
    memory: int = Field(description="Bytes that each is counted with.")
    hits: int = Field(description="Creates that found a ready instance.")
    misses: int = Field(description="Creates that did not, and had to wait for a start.")
    oldest_seconds: float | None = Field(description="Age of the oldest.")
    limited_by: Limit | None = Field(description="Why it is smaller than it would be.")
    message: str | None = Field(description="Why instances could not be started.")


class PoolPage(BaseModel):
    items: list[PoolOut]
    next_cursor: str | None


class Problem(BaseModel):
    """RFC 9457. `code` is stable; branch on it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
