"""Nodes and their warm pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


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
