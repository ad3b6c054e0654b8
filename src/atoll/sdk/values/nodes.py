"""Nodes and their warm pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """Progress of a drain."""

    total: int
    """Sessions at the beginning."""
    left: int
    """Sessions that have not left yet."""
    message: str | None = None
    """Why a session cannot leave."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node: a machine or a Docker engine that hosts instances."""

    id: str
    type: str
    url: str
    """URL of a replica that manages the node."""
    status: str
    """healthy or unhealthy."""
    session_count: int
    """Sessions that have an instance."""
    cpu_usage: float | None = None
    """Share of all cores, 0.0 to 1.0."""
    mem_usage: float | None = None
    """Share of all memory, 0.0 to 1.0."""
    last_heartbeat: datetime | None = None
    """Time of the last heartbeat."""
    max_sessions: int | None = None
    cached_templates: tuple[str, ...] = ()
    """Template versions that start without a pull or build, as `id@version`."""
    building_templates: tuple[str, ...] = ()
    failure_count: int = 0
    """Consecutive failed probes."""
    problem: str | None = None
    """Why the node is unhealthy."""
    cordoned: bool = False
    """True if the node gets no new sessions."""
    drain: DrainInfo | None = None
    """Progress of a drain, after one was requested."""
    labels: dict[str, str] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    """Isolation that templates can require."""
    features: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """Isolation that the node lacks, and why."""
    pool: dict[str, int] = field(default_factory=dict)
    """Ready instances by template."""
    shared_blobs: bool = False
    """Whether its sessions can move to other nodes."""
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
    """Why the node is unhealthy."""
    provides: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """Isolation that the node lacks, and why."""


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


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Warm pool of a template on the replica that responded."""

    template_id: str
    version: int
    """Version of the template."""
    ready: int
    starting: int
    target: int
    """Number of instances to keep ready."""
    wanted: int
    """Number that demand alone would justify, without memory limits."""
    minimum: int
    maximum: int
    rate_per_minute: float
    """Recent creates per minute."""
    memory: int
    """Bytes reserved per instance."""
    hits: int
    """Creates that found a ready instance."""
    misses: int
    """Creates that found none."""
    others: int = 0
    """Ready instances of other replicas on the same node."""
    start_seconds: float | None = None
    oldest_seconds: float | None = None
    limited_by: str | None = None
    """What limits the pool: maximum, memory_share, memory_free or failures."""
    message: str | None = None
    """Why instances could not be started."""
