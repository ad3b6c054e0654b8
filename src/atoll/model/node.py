"""A place that hosts instances, as it tells of itself and as others find it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """Real numbers of a node at one moment."""

    cpu_usage: float
    """0.0 to 1.0 of all cores."""
    mem_usage: float
    """0.0 to 1.0 of all memory."""
    disk_free: int
    """Bytes free where the workspaces are; 0 where that is not known."""
    cpu_count: int
    mem_total: int
    """Bytes."""
    load_average: float


class NodeHealth(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Drain:
    """How far the sessions of a node that is emptied have come."""

    total: int
    """Sessions that were there when it began."""
    left: int
    """Those of them that are there still."""
    message: str | None = None
    """Why one of them could not leave, if that is so."""


def versioned_name(template_id: str, number: int) -> str:
    """A version of a template as nodes list it: `python@2`."""
    return f"{template_id}@{number}"


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    type: str
    url: str
    """Where a control plane of it answers."""
    labels: dict[str, str] = field(default_factory=dict)
    provides: frozenset[str] = frozenset()
    """Names of `template.REQUIREMENTS` and of `instance.FEATURES`."""
    missing: dict[str, str] = field(default_factory=dict)
    max_sessions: int | None = None
    metrics: NodeMetrics | None = None
    sessions: int = 0
    """Those with an instance."""
    templates: tuple[str, ...] = ()
    """Editions of templates (`id@number`) of which it has all that instances need."""
    building: tuple[str, ...] = ()
    """Those that it is making."""
    pool: dict[str, int] = field(default_factory=dict)
    """Ready instances by template."""
    shared_blobs: bool = False
    """Whether what it saves of workspaces can be had on other nodes."""
    seen_at: datetime | None = None
    """When it last told of itself."""
    problem: str | None = None
    """Why no instance can be made there, as it says itself or as the last probe found."""
    # What others say of it:
    status: NodeHealth = NodeHealth.HEALTHY
    failures: int = 0
    """Probes that failed in a row."""
    cordoned: bool = False
    """Whether it gets no new sessions, because somebody said so."""
    drain: Drain | None = None
    """Since somebody asked for it, until it is uncordoned."""

    @property
    def drained(self) -> bool:
        return self.drain is not None and self.drain.left == 0


MOST_FAILURES = 1_000_000
"""More are not counted."""


def judged(node: Node, problem: str | None, *, unhealthy_after: int) -> tuple[NodeHealth, int]:
    """What a node is after a probe that found this problem or none, and how many have failed."""
    if problem is None:
        return NodeHealth.HEALTHY, 0
    failures = min(node.failures + 1, MOST_FAILURES)
    lost = node.status is NodeHealth.UNHEALTHY or failures >= unhealthy_after
    return NodeHealth.UNHEALTHY if lost else NodeHealth.HEALTHY, failures
