"""A place that hosts instances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """Real numbers of a node at one moment."""

    cpu_usage: float
    """0.0 to 1.0 of all cores."""
    mem_usage: float
    """0.0 to 1.0 of all memory."""
    disk_free: int
    """Bytes free where the workspaces are."""
    cpu_count: int
    mem_total: int
    """Bytes."""
    load_average: float


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    type: str
    url: str
