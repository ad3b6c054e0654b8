"""The durable sandbox that a user creates. It outlives its instances."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.packages import Install
    from atoll.model.resources import Resources
    from atoll.model.volume import VolumeMount


class SessionStatus(StrEnum):
    """What a session is, as far as is known; the last four are ends."""

    CREATING = "creating"
    """Its first instance is made; before that its packages are installed."""
    STARTING = "starting"
    """An instance is made for files that are there."""
    RESTORING = "restoring"
    """An instance is made, and its files come from the blob store."""
    RUNNING = "running"
    """It has an instance, which is looked at before it is trusted."""
    PAUSING = "pausing"
    PAUSED = "paused"
    """Its instance is there and stands still."""
    STOPPING = "stopping"
    """Its instance ends, and what runs in it."""
    STOPPED = "stopped"
    """It has no instance; its files are on its node."""
    ARCHIVING = "archiving"
    """Its files are copied to the blob store, and the copy is checked."""
    ARCHIVED = "archived"
    """It has no instance; its files are in the blob store alone."""
    ERROR = "error"
    """What is wanted could not be had; `cause` and `message` say why. It is tried again."""
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    TERMINATED = "terminated"

    @property
    def ended(self) -> bool:
        return self in ENDED

    @property
    def at_rest(self) -> bool:
        """Whether it has no instance, and needs none until somebody wants it to run."""
        return self in (SessionStatus.STOPPED, SessionStatus.ARCHIVED)


ENDED = frozenset(
    {
        SessionStatus.COMPLETED,
        SessionStatus.FAILED,
        SessionStatus.TIMEOUT,
        SessionStatus.TERMINATED,
    }
)


class Wanted(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    ARCHIVED = "archived"
    DESTROYED = "destroyed"


class Cause(StrEnum):
    """Why something ended; recorded for good."""

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
    """The executor sent what it may not: its image is broken, or hostile."""
    SHUTDOWN = "shutdown"


class WorkspaceMode(StrEnum):
    SYNC = "sync"
    """On the node's disk; what changes is copied to the blob store."""
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
    """Something that is weaker than asked for, and may pass."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    template_id: str
    status: SessionStatus
    wanted: Wanted
    runtime_type: str
    runtime_node: str
    resources: Resources
    timeout: int
    """Seconds of life."""
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    """When its life is over; of no meaning while it is at rest, since a start begins another."""
    env_vars: dict[str, str] = field(default_factory=dict)
    instance_id: str | None = None
    workspace: str | None = None
    """The driver's name for the session's files; kept when the instance is replaced."""
    ended_at: datetime | None = None
    cause: Cause | None = None
    message: str | None = None
    capacity: int = 1
    """Executions at the same time."""
    template_version: int = 1
    """The version of its template that it keeps, whatever becomes of the template."""
    install: Install | None = None
    """Its own Python packages; none when it asked for none."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Encrypted, by name."""
    volumes: tuple[VolumeMount, ...] = ()
    workspace_mode: WorkspaceMode = WorkspaceMode.SYNC
    durability: Durability = Durability.BACKGROUND
    started_from: str | None = None
    """The session whose files it began with."""
    warnings: tuple[Warning, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels that its node must have."""
    auto_start: bool = True
    """Whether a request that needs it starts it, when it is paused or at rest."""
    idle_timeout: int | None = None
    """Seconds without anything asked of it after which it is stopped."""
    archive_after: int | None = None
    """Seconds at rest after which it is archived."""
    delete_after: int | None = None
    """Seconds at rest after which it ends."""
    active_at: datetime | None = None
    """When something was last asked of it, as far as was written down."""
    rested_at: datetime | None = None
    """Since when it is at rest; none while it is not."""
    failures: int = 0
    """How often in a row what is wanted could not be had."""
    retry_at: datetime | None = None
    """When that is tried again."""
    version: int = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """What a session has on its node."""

    session_id: str
    instance_id: str | None
    workspace: str | None
