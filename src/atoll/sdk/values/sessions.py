"""Parts of a session: limits, volumes, packages, warnings, processes, contexts, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a session, in the notation of the API (`"500m"`, `"512Mi"`)."""

    cpu: str
    memory: str
    disk: str
    max_processes: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume that is mounted in a session at `path`."""

    volume_id: str
    path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as the server returned it."""

    id: str
    kind: str
    """local or s3."""
    size: str | None
    """None for s3: the bucket is the limit."""
    node_id: str | None
    """The node that stores the volume; None if all nodes can reach it."""
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Packages:
    """Python packages of a session, and the status of their installation."""

    status: str
    """installing, installed or failed."""
    requested: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning, for example that a limit cannot be enforced."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that an execution left running. `pid` is the one inside the session."""

    pid: int
    execution_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A context as the server returned it."""

    id: str
    session_id: str
    language: str
    cwd: str
    state: str
    """idle, busy or dead."""
    created_at: datetime
    execution_count: int = 0
    """Executions since the context was started."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A stored copy of a session's workspace."""

    session_id: str
    number: int
    """Grows by one with each checkpoint that contains changes."""
    created_at: datetime
    files: int
    size: int
    kept_until: datetime | None = None
    """None until the session has ended."""
