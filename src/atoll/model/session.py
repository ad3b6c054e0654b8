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
    CREATING = "creating"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    TERMINATED = "terminated"

    @property
    def ended(self) -> bool:
        return self not in (SessionStatus.CREATING, SessionStatus.RUNNING)


class Wanted(StrEnum):
    RUNNING = "running"
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
    version: int = 1
