"""Nodes: what they report about themselves, and how others judge them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """Measured load of a node."""

    cpu_usage: float
    """0.0 to 1.0 of all cores."""
    mem_usage: float
    """0.0 to 1.0 of all memory."""
    disk_free: int
    """Free bytes on the disk with the workspaces; 0 if unknown."""
    cpu_count: int
    mem_total: int
    """Bytes."""
    load_average: float


class NodeHealth(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Drain:
    """The progress of draining a node."""

    total: int
    """Sessions on the node when the drain started."""
    left: int
    """Sessions that are still there."""
    message: str | None = None
    """Why a session could not be moved."""


def versioned_name(template_id: str, number: int) -> str:
    """A version of a template as nodes list it: `python@2`."""
    return f"{template_id}@{number}"


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    type: str
    url: str
    """The URL of its replica."""
    labels: dict[str, str] = field(default_factory=dict)
    provides: frozenset[str] = frozenset()
    """Names of `template.REQUIREMENTS` and of `instance.FEATURES`."""
    missing: dict[str, str] = field(default_factory=dict)
    max_sessions: int | None = None
    metrics: NodeMetrics | None = None
    sessions: int = 0
    """Sessions with an instance."""
    templates: tuple[str, ...] = ()
    """Template versions (`id@number`) whose instances can start without a build or pull."""
    building: tuple[str, ...] = ()
    """Template versions that it is building or pulling."""
    pool: dict[str, int] = field(default_factory=dict)
    """Ready instances by template."""
    shared_blobs: bool = False
    """Whether other nodes can read its checkpoints."""
    seen_at: datetime | None = None
    """The time of its last report."""
    problem: str | None = None
    """Why no instance can be created there, according to itself or to the last probe."""
    # Written by others:
    status: NodeHealth = NodeHealth.HEALTHY
    failures: int = 0
    """How many probes failed in a row."""
    cordoned: bool = False
    """Whether an operator excluded it from new sessions."""
    drain: Drain | None = None
    """Set from the request to drain until the node is uncordoned."""

    @property
    def drained(self) -> bool:
        return self.drain is not None and self.drain.left == 0


MAX_FAILURES = 1_000_000
"""The count stops here."""


def health_after_probe(
    node: Node, problem: str | None, *, unhealthy_after: int
) -> tuple[NodeHealth, int]:
    """The health and failure count of a node after a probe that found `problem`."""
    if problem is None:
        return NodeHealth.HEALTHY, 0
    failures = min(node.failures + 1, MAX_FAILURES)
    lost = node.status is NodeHealth.UNHEALTHY or failures >= unhealthy_after
    return NodeHealth.UNHEALTHY if lost else NodeHealth.HEALTHY, failures
