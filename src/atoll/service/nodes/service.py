"""
List, cordon, drain and remove nodes.

What is known of another node is as old as its last report. A cordoned node gets no new sessions; a
node that is drained also hands its sessions over to others, which `reconcile/drains.py` does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, NotFound
from atoll.model.event import Event
from atoll.model.node import Drain, Node, NodeHealth
from atoll.model.session import SessionStatus

if TYPE_CHECKING:
    from atoll.service.nodes.local_node import LocalNode
    from atoll.service.replica import Replica


def node_topic(node_id: str) -> str:
    """Notified when a decision about a node was stored, or sessions have left it."""
    return f"node.{node_id}"


class Nodes:
    def __init__(self, replica: Replica, local: LocalNode) -> None:
        self.id = replica.node_id
        self.local = local
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self.known: tuple[Node, ...] = ()
        """As of the last report or list; for metrics, which must not read the store."""

    async def report(self) -> Node:
        """Store what this node reports of itself; returns it with what others observed."""
        nodes = {node.id: node for node in await self._store.nodes.all()}
        known, own = nodes.get(self.id), await self.local.describe()
        event = None
        if known is None:
            event = self._event("node.registered", type=own.type, url=own.url, labels=own.labels)
        await self._store.nodes.report(own, event=event)
        nodes[self.id] = node = own if known is None else _with_observations(own, known)
        self.known = tuple(nodes.values())
        return node

    async def get(self, node_id: str, *, code: str = "node_not_found") -> Node:
        """`code` is the code of the error if there is no such node."""
        found = await self._store.nodes.get(node_id)
        if node_id == self.id:
            own = await self.local.describe()
            return _current(own, found or own)
        if found is None:
            raise NotFound(f"There is no node {node_id}.", code=code)
        return found

    async def cordon(self, node_id: str) -> Node:
        """Place no new sessions on the node; its sessions stay."""
        node = await self.get(node_id)
        if not node.cordoned:
            await self._store.nodes.cordon(
                node_id, True, event=self._event("node.cordoned", node_id)
            )
            await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def uncordon(self, node_id: str) -> Node:
        """Place new sessions on the node again, and end a drain. Sessions do not return."""
        node = await self.get(node_id)
        if node.cordoned or node.drain is not None:
            # In this order: a node that is cordoned but not drained is in a valid state.
            await self._store.nodes.drain(node_id, None)
            await self._store.nodes.cordon(
                node_id, False, event=self._event("node.uncordoned", node_id)
            )
            await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def drain(self, node_id: str) -> Node:
        """Cordon the node, and move its sessions to others."""
        node = await self.get(node_id)
        if node.drain is None:
            await self._check_others(node)
            total = await self._count_unended(node_id)
            await self._store.nodes.cordon(node_id, True)
            await self._store.nodes.drain(
                node_id,
                Drain(total, total),
                event=self._event("node.draining", node_id, sessions=total),
            )
        await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def update_drain(self, node_id: str, message: str | None) -> None:
        """Store the progress of a drain; `message` says why a session cannot leave."""
        node = await self._store.nodes.get(node_id)
        if node is None or node.drain is None:
            return
        left = await self._count_unended(node_id)
        drain = Drain(max(node.drain.total, left), left, message if left else None)
        if drain == node.drain:
            return
        event = None
        if left == 0:
            event = self._event("node.drained", node_id, sessions=drain.total)
        await self._store.nodes.update_drain(node_id, drain, event=event)

    async def remove(self, node_id: str) -> None:
        """Delete the record of a node that has no sessions."""
        node = await self.get(node_id)
        if node.status is NodeHealth.HEALTHY and not node.drained:
            raise Conflict(
                f"Node {node_id} is healthy. Drain it first, or stop its replicas.",
                code="node_in_use",
            )
        if left := await self._count_unended(node_id):
            raise Conflict(
                f"Node {node_id} still has {left} sessions.", code="node_in_use", sessions=left
            )
        await self._store.nodes.remove(node_id, event=self._event("node.removed", node_id))

    async def _check_others(self, node: Node) -> None:
        if not node.shared_blobs:
            raise Conflict(
                f"Cannot drain node {node.id}: checkpoints of its sessions are on its own disk. "
                "Keep blobs on S3 (ATOLL_BLOB__URL), or cordon the node and wait until its "
                "sessions have ended.",
                code="drain_unavailable",
            )
        others = [
            other
            for other in await self._store.nodes.all()
            if other.id != node.id
            and other.status is NodeHealth.HEALTHY
            and other.shared_blobs
            and not other.cordoned
        ]
        if not others:
            raise Conflict(
                f"Cannot drain node {node.id}: no other node is healthy and accepts sessions.",
                code="drain_unavailable",
            )

    async def _count_unended(self, node_id: str) -> int:
        counts = [
            await self._store.sessions.count(status, node_id=node_id)
            for status in SessionStatus
            if not status.ended
        ]
        return sum(counts)

    def _event(self, kind: str, node_id: str | None = None, **data: Any) -> Event:
        return Event(kind, node_id or self.id, self._clock.now(), data)

    async def list(self) -> list[Node]:
        """In order of id; this node as of now, the others as of their last reports."""
        own = await self.local.describe()
        known = {node.id: node for node in await self._store.nodes.all()}
        known[self.id] = _current(own, known.get(self.id, own))
        self.known = tuple(known[node_id] for node_id in sorted(known))
        return [*self.known]


def _current(own: Node, known: Node) -> Node:
    """Like `_with_observations`, but a problem of this node counts at once."""
    node = _with_observations(own, known)
    return node if own.problem is None else dataclasses.replace(node, status=NodeHealth.UNHEALTHY)


def _with_observations(own: Node, known: Node) -> Node:
    """What a node reports of itself, with what others observed."""
    return dataclasses.replace(
        own,
        problem=own.problem or (known.problem if known.status is NodeHealth.UNHEALTHY else None),
        status=known.status,
        failures=known.failures,
        cordoned=known.cordoned,
        drain=known.drain,
    )
