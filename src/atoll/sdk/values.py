"""
What the client gives back: frozen values, one for each answer of the wire.

Times are aware, sizes are bytes, durations are seconds unless the name says otherwise.
"""

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
class Limits:
    """What a session may use at most, in the notation of the API (`"500m"`, `"512Mi"`)."""

    cpu: str
    memory: str
    disk: str
    max_processes: int


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that an execution left running; `pid` is as the session sees it."""

    pid: int
    execution_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume as a session sees it."""

    volume_id: str
    path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as the server describes it."""

    id: str
    kind: str
    """local or s3."""
    size: str | None
    """None where the bucket sets the bound."""
    node_id: str | None
    """The node that has it; none for one that all have."""
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Packages:
    """Python packages of a session's own, and how far they are."""

    status: str
    """installing, installed or failed."""
    requested: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    code: str
    message: str


@dataclass(frozen=True, slots=True, repr=False)
class SessionInfo:
    """A session as the server saw it when it answered."""

    id: str
    template_id: str
    status: str
    """
    What it is: creating, starting, restoring, running, pausing, paused, stopping, stopped,
    archiving, archived or error; or how it ended: completed, failed, timeout or terminated.
    """
    wanted: str
    """What it is to become: running, paused, stopped, archived or destroyed."""
    runtime_type: str
    runtime_node: str
    resources: Limits
    timeout: int
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    """When its life is over; none while it is stopped or archived."""
    observed: str = ""
    """The status, with all ends as one."""
    capacity: int = 1
    """Executions that may run in it at the same time."""
    env_vars: dict[str, str] = field(default_factory=dict)
    container_id: str | None = None
    pod_name: str | None = None
    ended_at: datetime | None = None
    cause: str | None = None
    """Why it ended, was stopped, or is in `error`."""
    message: str | None = None
    template_version: int = 1
    secrets: tuple[str, ...] = ()
    """The names of its secrets."""
    volumes: tuple[Mount, ...] = ()
    workspace_mode: str = "sync"
    durability: str = "background"
    started_from: str | None = None
    dependencies: Packages | None = None
    """Its own Python packages; none when it asked for none."""
    warnings: tuple[Notice, ...] = ()
    """What is weaker than asked for."""
    labels: dict[str, str] = field(default_factory=dict)
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels that its node must have."""
    auto_start: bool = True
    """Whether a request that needs it starts it when it is paused or at rest."""
    idle_timeout: int | None = None
    """Seconds without requests until it is stopped."""
    archive_after: int | None = None
    """Seconds at rest until it is archived."""
    delete_after: int | None = None
    """Seconds at rest until it ends."""
    active_at: datetime | None = None
    """When something was last asked of it, as far as was written down."""
    rested_at: datetime | None = None
    """Since when it is stopped or archived."""
    failures: int = 0
    """How often in a row it could not become what is wanted."""
    retry_at: datetime | None = None
    """When that is tried again."""
    stale: bool = False
    """The server's database is away: this is what was known last."""

    def __repr__(self) -> str:
        return f"<SessionInfo {self.id} {self.status}, {self.template_id} on {self.runtime_node}>"


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A context as the server saw it when it answered."""

    id: str
    session_id: str
    language: str
    cwd: str
    state: str
    """idle, busy or dead."""
    created_at: datetime
    execution_count: int = 0
    """Executions since it was started."""


@dataclass(frozen=True, slots=True)
class Metrics:
    duration_ms: float
    cpu_time_ms: float
    peak_memory_mb: float
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why an execution did not succeed; `name` and `traceback` are those of a Python exception."""

    code: str
    message: str
    name: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """How an execution ended, with its output."""

    execution_id: str
    status: Literal["success", "failed", "timeout", "error"]
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    execution_time: float = 0.0
    return_value: Any = None
    """What `handler(event)`, or the function that was invoked, returned."""
    results: tuple[Display, ...] = ()
    """What a context showed, in order."""
    metrics: Metrics | None = None
    artifacts: tuple[str, ...] = ()
    """Files made or changed by this execution, relative to the workspace."""
    cause: str | None = None
    signal: str | None = None
    error: ErrorInfo | None = None
    stdout_truncated: bool = False
    stdout_bytes: int = 0
    stderr_truncated: bool = False
    stderr_bytes: int = 0
    artifacts_truncated: bool = False
    shortened: tuple[str, ...] = ()
    """Fields of which the server has lost all but the beginning."""

    @property
    def ok(self) -> bool:
        return self.status == "success"

    def check(self) -> Result:
        """This result if it is a success; raises `ExecutionFailed` otherwise."""
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
        """For a notebook, as a cell's output: stdout, stderr, then what was shown or returned."""
        parts = [preformatted(self.stdout), preformatted(self.stderr, "color:#b00")]
        parts += [shown._repr_html_() for shown in self.results]
        if self.return_value is not None:
            parts.append(preformatted(repr(self.return_value)))
        if self.error is not None:
            error = self.error.traceback or f"{self.error.code}: {self.error.message}"
            if error.strip() not in self.stderr:
                parts.append(preformatted(error, "color:#b00"))
        return "".join(parts) or preformatted(repr(self))


class ExecutionFailed(AtollError):
    """An execution that ended without success; `result` is all that is known of it."""

    code = "execution_failed"

    def __init__(self, result: Result) -> None:
        marks = [f"cause: {result.cause}"] if result.cause else []
        if result.signal:
            marks.append(f"signal: {result.signal}")
        elif result.exit_code is not None:
            marks.append(f"exit code: {result.exit_code}")
        text = f"Execution {result.execution_id} ended with status {result.status}"
        text += f" ({', '.join(marks)})" if marks else ""
        text += f": {result.error.message}" if result.error else ""
        tail = result.stderr.rstrip().splitlines()[-_TAIL:]
        super().__init__("\n".join([text, *tail]))
        self.result = result

    def __reduce__(self) -> tuple[type[ExecutionFailed], tuple[Result]]:
        return (type(self), (self.result,))


@dataclass(frozen=True, slots=True)
class Status:
    """Where an execution is."""

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
    """A try at an execution that has ended; `cause` says why, none when it completed."""

    started_at: datetime
    ended_at: datetime
    node_id: str
    container_id: str | None = None
    cause: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person says to an approval: yes or no, and any JSON value or words with it."""

    approved: bool
    answer: Any = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.approved


@dataclass(frozen=True, slots=True)
class Approval:
    """A question of running code to a person; the code wrote it, so treat it as untrusted."""

    id: str = ""
    question: str = ""
    data: Any = None
    timeout: float | None = None
    """Seconds that the code waits in all; then it is refused."""
    state: str = "asked"
    """
    asked, answered or refused. Each question is told of when asked, and how it ended, unless its
    session was ended meanwhile.
    """
    approved: bool | None = None
    answer: Any = None
    reason: str | None = None
    """Of a refusal: timeout, cancelled, shutdown, or the person's words."""

    @property
    def asked(self) -> bool:
        return self.state == "asked"


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt was lost by no fault of the code, and there is to be another."""

    attempt: int
    """The number of the next one; the first was 1."""
    cause: str | None = None
    message: str | None = None
    delay: float | None = None
    """Seconds until then."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that an execution made or changed."""

    path: str
    size: int
    mime_type: str
    type: str
    created_at: datetime
    checksum: str | None = None
    """SHA-256; none for a file too large to be hashed at once."""
    download_url: str | None = None
    """A link that needs no key and is good for an hour; none in lists of executions."""
    execution_id: str | None = None
    """The last one that made or changed it, in a session's list."""


@dataclass(frozen=True, slots=True, repr=False)
class ExecutionInfo:
    """An execution's whole record."""

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
    """Fields that are whole only when the execution is asked for by its id, not in a list."""
    retry_count: int = 0
    attempts: tuple[Attempt, ...] = ()
    """Those that have ended, in order."""
    approval: Approval | None = None
    """What it waits to be told."""
    stale: bool = False
    """The server's database is away: this is what was known last."""
    started_at: datetime | None = None
    completed_at: datetime | None = None

    def __repr__(self) -> str:
        work = repr(self.code if self.code is not None else list(self.command or ()))
        return f"<ExecutionInfo {self.id} {self.status} in {self.session_id}: {short(work)}>"


@dataclass(frozen=True, slots=True)
class InvocationInfo:
    """A request to run something, as the server saw it when it answered."""

    invocation_id: str
    execution_id: str
    """Of its executions, the latest."""
    session_id: str
    mode: str
    status: str
    """accepted, running, succeeded, failed or cancelled."""
    created_at: datetime
    function_name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    completed_at: datetime | None = None
    result: Result | None = None
    """Of the latest execution; none in a list, and until it has ended."""
    console_url: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("accepted", "running")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an execution, in order; the last one is its `result`."""

    sequence: int
    """Grows; 0 for `queued` and `heartbeat`, which only tell how things are at the moment."""
    kind: Literal[
        "queued",
        "started",
        "stdout",
        "stderr",
        "display",
        "approval",
        "heartbeat",
        "retry",
        "result",
    ]
    data: bytes = b""
    """Output as it was written; a chunk may end in the middle of a character."""
    result: Result | None = None
    display: Display | None = None
    """What a context showed."""
    approval: Approval | None = None
    retry: Retry | None = None
    ahead: int | None = None
    """Of `queued`: how many executions are before it in its session."""
    attempt: int | None = None
    """Of `started`: which attempt; the first is 1."""
    execution_id: str = ""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ConsoleExit:
    """How an execution ended that was watched on a console."""

    status: str
    """completed, failed, timeout, crashed or cancelled."""
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ConsoleEvent:
    """Something that a console tells; the last one is the `exit`."""

    kind: Literal["stdout", "stderr", "status", "error", "exit"]
    data: bytes = b""
    """Output as it was written; a terminal has only stdout."""
    status: str | None = None
    typing: bool = False
    """With `status`: whether this console may type."""
    code: str | None = None
    message: str | None = None
    """With `error`: what of this console's input was refused, and why."""
    exit: ConsoleExit | None = None

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Entry:
    """
    A file or directory; `path` is relative to the workspace. Bytes of a name that are not UTF-8 are
    as `os.fsdecode` writes them.
    """

    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified_at: datetime
    etag: str | None = None
    """Another one whenever the file is changed; of a file only."""


@dataclass(frozen=True, slots=True)
class Match:
    """A line that holds what was searched for; `line` and `column` begin with 1."""

    path: str
    line: int
    column: int
    text: str
    """The line, or 400 characters of it around the match."""


@dataclass(frozen=True, slots=True)
class FileEvent:
    """What happened to a file."""

    kind: Literal["watching", "created", "modified", "deleted", "moved", "overflow"]
    """`watching` comes first; `overflow` says that some were missed: look for yourself."""
    path: str = ""
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A URL by which whoever has it can read or write one file."""

    url: str
    method: str
    expires_at: datetime
    native: bool = False
    """Whether it leads straight to the blob store."""
    complete_url: str | None = None
    """To POST to, without a body, after a PUT to a native one."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What was copied of a directory."""

    path: str
    """Where it is now."""
    files: int
    size: int
    """Bytes of these files together."""
    left_out: tuple[str, ...] = ()
    """What could not be copied, with the reason; the first 1000 of it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a session as they were saved."""

    session_id: str
    number: int
    """One more each time that something had changed."""
    created_at: datetime
    files: int
    size: int
    kept_until: datetime | None = None
    """None while the session lives."""


@dataclass(frozen=True, slots=True)
class SecurityContext:
    require: tuple[str, ...] = ()
    """What a node must be able to give; a node that cannot is not used."""


@dataclass(frozen=True, slots=True)
class RegistryInfo:
    """That a template has credentials, and for which registry."""

    server: str


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """What sessions start from."""

    id: str
    name: str
    default_resources: Limits
    version: int
    created_at: datetime
    updated_at: datetime
    image: str = ""
    base_image: str = ""
    pre_installed_packages: tuple[str, ...] = ()
    security_context: SecurityContext = field(default_factory=SecurityContext)
    python: str = ""
    preload: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    pool_size: int = 0
    """Ready instances that are kept at least."""
    pool_max: int | None = None
    """Ready instances that are kept at most; as the server's settings say when none."""
    debian_packages: tuple[str, ...] = ()
    python_packages: tuple[str, ...] = ()
    installed_packages: tuple[str, ...] = ()
    """The Python packages that these came to, as `name==version`."""
    runtime: str = ""
    dockerfile: str | None = None
    build_context: str | None = None
    """The digest of the files that the Dockerfile copies."""
    registry: RegistryInfo | None = None
    image_digest: str | None = None
    """Of the image in its registry, once it was pulled."""
    entrypoint: tuple[str, ...] | None = None
    """The image's own, once it is known; what runs is Atoll's executor."""
    command: tuple[str, ...] | None = None
    status: str = "ready"
    """pending, building, ready or failed; sessions start from the newest version that is ready."""
    message: str | None = None
    """Why the build failed, or what its last attempt came to."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something that a build printed, or a change of how it goes."""

    text: str | None = None
    status: str | None = None
    attempts: int = 0
    message: str | None = None


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """How far the sessions of a node that is emptied have come."""

    total: int
    """Sessions that were there when it began."""
    left: int
    """Those that are there still."""
    message: str | None = None
    """Why one of them cannot leave, if that is so."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """A change of a session, execution, node or template, as the feed tells it."""

    type: str
    """Like `session.stopped`."""
    subject: str
    """The id of what changed."""
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    """Its place on the feed; none for one that is on none, as a webhook's test."""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """How it went with a webhook so far."""

    failures: int = 0
    """Tries at the next event, all of which failed."""
    gave_up: int = 0
    """Events given up after too many tries."""
    missed: int = 0
    """Events that were no longer kept when it was their turn."""
    last_status: int | None = None
    last_error: str | None = None
    last_at: datetime | None = None
    retry_at: datetime | None = None
    """When the next event is tried again."""


@dataclass(frozen=True, slots=True)
class WebhookInfo:
    """An address that is told of events."""

    id: str
    url: str
    types: tuple[str, ...]
    """Of the events that it is told of; all when there are none."""
    enabled: bool
    created_at: datetime
    delivered: int
    """The number of the last event that it was told of."""
    deliveries: Deliveries
    secret: str | None = field(default=None, repr=False)
    """What deliveries are signed with, in the answer that made it and never again."""


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """What came of sending an event to a webhook."""

    delivered: bool
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The ready instances of a template, of the control plane that answered."""

    template_id: str
    version: int
    """Of the template."""
    ready: int
    starting: int
    target: int
    """How many are to be ready."""
    wanted: int
    """How many would be, if the node had the memory."""
    minimum: int
    maximum: int
    rate_per_minute: float
    """Creates, lately."""
    memory: int
    """Bytes that each is counted with."""
    hits: int
    """Creates that found a ready instance."""
    misses: int
    """Creates that did not."""
    others: int = 0
    """Ready ones that other control planes of the same node have."""
    start_seconds: float | None = None
    oldest_seconds: float | None = None
    limited_by: str | None = None
    """maximum, memory_share, memory_free or failures: why it is smaller than it would be."""
    message: str | None = None
    """Why instances could not be started."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A place that hosts instances."""

    id: str
    type: str
    url: str
    """Where a control plane of it answers."""
    status: str
    """healthy or unhealthy."""
    session_count: int
    """Sessions with an instance."""
    cpu_usage: float | None = None
    """0.0 to 1.0 of all cores."""
    mem_usage: float | None = None
    """0.0 to 1.0 of all memory."""
    last_heartbeat: datetime | None = None
    """When it last told of itself."""
    max_sessions: int | None = None
    cached_templates: tuple[str, ...] = ()
    """Versions of templates that can start there at once, as `id@version`."""
    building_templates: tuple[str, ...] = ()
    failure_count: int = 0
    """Probes that failed in a row."""
    problem: str | None = None
    """Why it is unhealthy."""
    cordoned: bool = False
    """Whether it gets no new sessions."""
    drain: DrainInfo | None = None
    """How far its emptying is, once it was asked for."""
    labels: dict[str, str] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    """What a template can require of it."""
    features: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """What it cannot give, and why."""
    pool: dict[str, int] = field(default_factory=dict)
    """Ready instances by template."""
    shared_blobs: bool = False
    """Whether its sessions can go on elsewhere."""
    cpu_count: int | None = None
    load_average: float | None = None
    mem_total: int | None = None
    disk_free: int | None = None


@dataclass(frozen=True, slots=True)
class NodeHealth:
    id: str
    status: str
    checked_at: datetime
    problem: str | None = None
    """Why it is unhealthy."""
    provides: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """What the node cannot give, and why."""


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    id: str
    cpu_usage: float
    cpu_count: int
    load_average: float
    mem_usage: float
    mem_total: int
    disk_free: int
    session_count: int
    pool: dict[str, int] = field(default_factory=dict)
    """Ready instances by template."""
