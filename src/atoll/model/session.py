"""The durable sandbox that a user creates. It outlives its instances."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.resources import Resources


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
    version: int = 1
