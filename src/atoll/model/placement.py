"""
Ranks the nodes that a session can be placed on.

A node fits if it is healthy, accepts new sessions, meets the requirements and has room. Of the
nodes that fit, one with few sessions comes before one with many, then one that starts the session
sooner, then one with less load. The order depends on the arguments only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.model.node import Node, NodeHealth
from atoll.model.resources import Resources

MOUNT = "mount"
"""The feature of nodes that can mount workspaces and volumes from the blob store."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a session needs from its node."""

    template: str
    """The version of its template, as `id@number`."""
    resources: Resources
    require: frozenset[str] = frozenset()
    """Names of `template.REQUIREMENTS`."""
    features: frozenset[str] = frozenset()
    """What `instance.Capabilities.features` may have, and `MOUNT`."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that the node must have."""
    node_id: str | None = None
    """The only possible node, because it has a volume of the session on its disk."""
    exclude: frozenset[str] = frozenset()
    """Nodes to leave out."""
    pooled: bool = True
    """Whether an instance of a warm pool can be used."""
    shared_blobs: bool = False
    """Whether the node must be able to read checkpoints of other nodes."""


def rank(nodes: Iterable[Node], request: PlacementRequest, *, spread_above: int) -> list[Node]:
    """The nodes that fit, best first."""
    found = [node for node in nodes if reason_not_to_place(node, request) is None]
    return sorted(found, key=lambda node: _order(node, request, spread_above))


def reason_not_to_place(node: Node, request: PlacementRequest) -> str | None:
    """Why the session cannot be placed on the node; None if it can."""
    if node.id in request.exclude:
        return "it is excluded"
    if request.node_id not in (None, node.id):
        return "a volume is on another node"
    if node.status is not NodeHealth.HEALTHY or node.problem is not None:
        return f"it is unhealthy: {node.problem or 'it does not answer'}"
    if node.cordoned or node.drain is not None:
        return "it accepts no new sessions"
    missing = (request.require | request.features) - node.provides
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    if any(node.labels.get(name) != value for name, value in request.labels.items()):
        return "it has other labels"
    if request.shared_blobs and not node.shared_blobs:
        return "its blobs are on its own disk"
    if node.max_sessions is not None and node.sessions >= node.max_sessions:
        return f"it has {node.sessions} sessions, its maximum"
    if node.metrics is not None and memory_left(node) < request.resources.memory:
        return "it has not enough free memory"
    return None


def memory_left(node: Node) -> int:
    """Free memory in bytes; 0 if the node has not reported its load."""
    metrics = node.metrics
    return 0 if metrics is None else int(metrics.mem_total * (1.0 - metrics.mem_usage))


def _order(
    node: Node, request: PlacementRequest, spread_above: int
) -> tuple[bool, int, float, int, str]:
    return (
        node.sessions > spread_above,
        _soon(node, request),
        _load(node),
        node.sessions,
        node.id,
    )


def _soon(node: Node, request: PlacementRequest) -> int:
    """How soon the session would run there; 0 is immediately."""
    template_id, _, _ = request.template.rpartition("@")
    if request.pooled and node.pool.get(template_id, 0) > 0:
        return 0
    if request.template in node.templates:
        return 1
    return 2 if request.template in node.building else 3


def _load(node: Node) -> float:
    """
    0.0 to 1.0, rounded to tenths, so that small differences do not outweigh the number of sessions.
    A node that has not reported its load counts as busy.
    """
    if node.metrics is None:
        return 1.0
    return round(max(node.metrics.cpu_usage, node.metrics.mem_usage), 1)
