"""Values that belong to a session: its limits, packages, contexts, processes and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session may use at most, in the notation of the API (`"500m"`, `"512Mi"`)."""

    cpu: str
    memory: str
    disk: str
    max_processes: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume as a session sees it."""

    volume_id: str
    path: str
    read_only: bool = True


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


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that an execution left running; `pid` is as the session sees it."""

    pid: int
    execution_id: str
    name: str


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
