"""The durable sandbox that a user creates. It outlives its instances."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.model.install import Install
from atoll.model.resources import Resources
from atoll.model.volume import VolumeMount

MAX_TIMER = 10 * 365 * 86_400
"""Seconds: the longest idle, archive or delete timer."""
MAX_LABELS = 64
MAX_ENV_VARS = 256
MAX_VOLUMES = 16


class SessionStatus(StrEnum):
    """The status as last observed; the last four are final."""

    CREATING = "creating"
    """Its packages are installed and its first instance is created."""
    STARTING = "starting"
    """An instance is created for files on the node."""
    RESTORING = "restoring"
    """An instance is created, with files from the blob store."""
    RUNNING = "running"
    """It has an instance, which is probed before it is used."""
    PAUSING = "pausing"
    PAUSED = "paused"
    """Its instance exists and is frozen."""
    STOPPING = "stopping"
    """Its instance is being ended."""
    STOPPED = "stopped"
    """It has no instance; its files are on its node, or in the blob store if that is a cluster."""
    ARCHIVING = "archiving"
    """Its files are copied to the blob store, and the copy is verified."""
    ARCHIVED = "archived"
    """It has no instance; its files are only in the blob store."""
    ERROR = "error"
    """The wanted status could not be reached, see `cause` and `message`. Retried."""
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    TERMINATED = "terminated"

    @property
    def ended(self) -> bool:
        return self in ENDED

    @property
    def stopped_or_archived(self) -> bool:
        """Whether it has no instance and needs none until it is started."""
        return self in (SessionStatus.STOPPED, SessionStatus.ARCHIVED)

    @property
    def keeps_instance(self) -> bool:
        """Whether it goes on with the instance that its record names, if that exists."""
        return self is SessionStatus.ERROR or (
            self in COUNTED_ON_NODE and self is not SessionStatus.STOPPING
        )


ENDED = frozenset(
    {
        SessionStatus.COMPLETED,
        SessionStatus.FAILED,
        SessionStatus.TIMEOUT,
        SessionStatus.TERMINATED,
    }
)
COUNTED_ON_NODE = (
    SessionStatus.CREATING,
    SessionStatus.STARTING,
    SessionStatus.RESTORING,
    SessionStatus.RUNNING,
    SessionStatus.PAUSING,
    SessionStatus.PAUSED,
    SessionStatus.STOPPING,
)
"""Statuses in which a session counts towards the limit of its node: it has or gets an instance."""


class Wanted(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    ARCHIVED = "archived"
    DESTROYED = "destroyed"

    @property
    def stops(self) -> bool:
        """Whether the session has no instance when it is reached, and can be started again."""
        return self in (Wanted.STOPPED, Wanted.ARCHIVED)


class Cause(StrEnum):
    """Why something ended. Stored permanently."""

    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    DISK = "disk"
    TIMEOUT = "timeout"
    USER = "user"
    IDLE = "idle"
    EVICTED = "evicted"
    NODE_LOST = "node_lost"
    INSTANCE_LOST = "instance_lost"
    DEPENDENCY = "dependency"
    DRIVER = "driver"
    PROTOCOL = "protocol"
    """The executor broke the protocol: its image is defective or hostile."""
    SHUTDOWN = "shutdown"


class WorkspaceMode(StrEnum):
    SYNC = "sync"
    """On the node's disk; changes are copied to the blob store."""
    MOUNT = "mount"
    """In the blob store itself, mounted by the node."""


class Durability(StrEnum):
    """When what an execution changed is in the blob store."""

    BACKGROUND = "background"
    """Soon after its result."""
    EXECUTION = "execution"
    """Before its result is final."""


@dataclass(frozen=True, slots=True)
class Warning:
    """Something that is temporarily weaker than requested."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    template_id: str
    status: SessionStatus
    wanted: Wanted
    """The status that was asked for last."""
    runtime_type: str
    runtime_node: str
    resources: Resources
    timeout: int
    """Lifetime in seconds, counted from its last start."""
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    """When its lifetime ends; has no meaning while it is stopped or archived."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of all code in the session."""
    instance_id: str | None = None
    workspace: str | None = None
    """The driver's name for its files; unchanged when the instance is replaced."""
    ended_at: datetime | None = None
    cause: Cause | None = None
    """Why it ended or failed."""
    message: str | None = None
    """The cause in words."""
    capacity: int = 1
    """How many executions may run at the same time."""
    template_version: int = 1
    """The version of its template, which it keeps when the template changes."""
    install: Install | None = None
    """Its own Python packages; null if none were requested."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Encrypted environment variables, by name."""
    volumes: tuple[VolumeMount, ...] = ()
    workspace_mode: WorkspaceMode = WorkspaceMode.SYNC
    """Where its files are: `sync` or `mount`."""
    durability: Durability = Durability.BACKGROUND
    """When what an execution changed is in the blob store: `background` or `execution`."""
    started_from: str | None = None
    """The session from whose last checkpoint it started."""
    warnings: tuple[Warning, ...] = ()
    """
    Problems that do not stop the session, for example files that are not in the blob store yet.
    """
    labels: dict[str, str] = field(default_factory=dict)
    """Names and values chosen by its user."""
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels that its node must have."""
    auto_start: bool = True
    """Whether a request that needs it starts it when it is paused, stopped or archived."""
    idle_timeout: int | None = None
    """Seconds without a request after which it is stopped; never if null."""
    archive_after: int | None = None
    """Seconds that it stays stopped before it is archived; never if null."""
    delete_after: int | None = None
    """Seconds that it stays stopped or archived before it is terminated; never if null."""
    active_at: datetime | None = None
    """The time of its last request, stored at intervals and not for each request."""
    rested_at: datetime | None = None
    """When a stop or archive was requested; null if none was since its last start."""
    failures: int = 0
    """How many attempts to reach the wanted status have failed in a row."""
    retry_at: datetime | None = None
    """When the next attempt is made."""
    version: int = 1

    def stopped_since(self, moment: datetime) -> bool:
        """Whether its stop or archive was requested at that moment or later."""
        return self.rested_at is not None and self.rested_at >= moment

    @property
    def mount_prefix(self) -> str | None:
        """Prefix of the workspace in the bucket; null unless it is mounted from there."""
        return f"mounts/{self.id}" if self.workspace_mode is WorkspaceMode.MOUNT else None


@dataclass(frozen=True, slots=True)
class Holding:
    """What a session has on its node."""

    session_id: str
    instance_id: str | None
    workspace: str | None
