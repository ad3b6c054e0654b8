"""
Where a session can have its instance: the nodes that fit, the best one first.

A node fits when it is well, takes new sessions, can give what is demanded, and has room. Of those
that fit, one with few sessions comes before one with many; among these the one that starts it
soonest, and then the one that has least to do. The order depends on nothing but what is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.model.node import Node, NodeHealth
from atoll.model.resources import Resources

MOUNT = "mount"
"""Among what a node provides: workspaces and volumes of the blob store can be mounted there."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a session asks of a node."""

    template: str
    """The edition of its template, as `id@number`."""
    resources: Resources
    require: frozenset[str] = frozenset()
    """Names of `template.REQUIREMENTS`."""
    features: frozenset[str] = frozenset()
    """What `instance.Capabilities.features` may have, and `MOUNT`."""
    labels: dict[str, str] = field(default_factory=dict)
    """Those of a node that must be just so."""
    node_id: str | None = None
    """The only node that will do: it has a volume of the session's on its disk."""
    exclude: frozenset[str] = frozenset()
    """Nodes that will not do, whatever they have."""
    pooled: bool = True
    """Whether an instance will do that was made for nobody in particular."""
    shared_blobs: bool = False
    """Whether files that another node has saved must be there."""


def rank(nodes: Iterable[Node], demand: PlacementRequest, *, spread_above: int) -> list[Node]:
    """The nodes that fit, best first; none when none does."""
    found = [node for node in nodes if reason_not_to_place(node, demand) is None]
    return sorted(found, key=lambda node: _order(node, demand, spread_above))


def reason_not_to_place(node: Node, demand: PlacementRequest) -> str | None:
    """Why the node will not do, in words; none when it will."""
    if node.id in demand.exclude:
        return "it is left out"
    if demand.node_id not in (None, node.id):
        return "a volume is on another node"
    if node.status is not NodeHealth.HEALTHY or node.problem is not None:
        return f"it is not well: {node.problem or 'it does not answer'}"
    if node.cordoned or node.drain is not None:
        return "it takes no new sessions"
    missing = (demand.require | demand.features) - node.provides
    if missing:
        return f"it cannot give {', '.join(sorted(missing))}"
    if any(node.labels.get(name) != value for name, value in demand.labels.items()):
        return "it has other labels"
    if demand.shared_blobs and not node.shared_blobs:
        return "its blobs are on its own disk"
    if node.max_sessions is not None and node.sessions >= node.max_sessions:
        return f"it has {node.sessions} sessions, and takes no more"
    if node.metrics is not None and memory_left(node) < demand.resources.memory:
        return "it has not enough memory left"
    return None


def memory_left(node: Node) -> int:
    """Bytes, of a node that has told how much it uses."""
    metrics = node.metrics
    return 0 if metrics is None else int(metrics.mem_total * (1.0 - metrics.mem_usage))


def _order(
    node: Node, demand: PlacementRequest, spread_above: int
) -> tuple[bool, int, float, int, str]:
    return (
        node.sessions > spread_above,
        _soon(node, demand),
        _load(node),
        node.sessions,
        node.id,
    )


def _soon(node: Node, demand: PlacementRequest) -> int:
    """How soon it would run there: 0 is at once."""
    template_id, _, _ = demand.template.rpartition("@")
    if demand.pooled and node.pool.get(template_id, 0) > 0:
        return 0
    if demand.template in node.templates:
        return 1
    return 2 if demand.template in node.building else 3


def _load(node: Node) -> float:
    """
    0.0 to 1.0, in tenths: the number of sessions says more than a difference that passes. A node
    that has not told counts as busy.
    """
    if node.metrics is None:
        return 1.0
    return round(max(node.metrics.cpu_usage, node.metrics.mem_usage), 1)
