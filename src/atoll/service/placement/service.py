"""
Chooses the node of a session.

Nodes are read at most once a second. Sessions placed on a node since its last report are added to
what it reported, so that a burst of new sessions is spread over several nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import PermanentError, TemporaryError
from atoll.model.node import versioned_name
from atoll.model.placement import MOUNT, PlacementRequest, rank, reason_not_to_place
from atoll.model.session import COUNTED_ON_NODE, WorkspaceMode
from atoll.model.volume import S3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.model.volume import Volume
    from atoll.service.templates.service import Templates
    from atoll.settings import NodeSettings
    from atoll.stores.base import Store

CACHE_SECONDS = 1.0


class Placement:
    def __init__(
        self,
        store: Store,
        templates: Templates,
        clock: Clock,
        settings: NodeSettings,
        node_id: str,
        ready_instances: Callable[[], dict[str, int]],
    ) -> None:
        """`ready_instances` counts the ready instances of this node, by template."""
        self._store = store
        self._templates = templates
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._ready_instances = ready_instances
        self._read: tuple[float, list[Node]] | None = None
        self._placed: dict[str, list[datetime]] = {}
        """Times at which sessions were placed on a node, by its id."""

    async def candidates(self, request: PlacementRequest) -> list[Node]:
        """All nodes that fit, the best first."""
        found = self._ranked(await self._nodes(), request)
        if not found:
            # Nodes that reported to be full may have room by now.
            self.invalidate()
            found = self._ranked(await self._recounted(), request)
        return found

    def _ranked(self, nodes: list[Node], request: PlacementRequest) -> list[Node]:
        if [node.id for node in nodes] == [self._node_id]:
            nodes = [self._alone(nodes[0])]
        return rank(nodes, request, spread_above=self._settings.spread_above)

    async def _recounted(self) -> list[Node]:
        """The nodes with the number of sessions that the store has at this moment."""
        self._placed.clear()
        nodes = []
        for node in await self._nodes():
            counts = [
                await self._store.sessions.count(status, node_id=node.id)
                for status in COUNTED_ON_NODE
            ]
            nodes.append(dataclasses.replace(node, sessions=sum(counts)))
        return nodes

    def record(self, node_id: str) -> None:
        """A session was placed on a node, which has not reported it yet."""
        self._placed.setdefault(node_id, []).append(self._clock.now())

    def invalidate(self) -> None:
        """Read the nodes again at the next request."""
        self._read = None

    async def assign(self, session: Session) -> Node:
        """The new node of a session that must leave its own; it counts there from now on."""
        node = await self.check(session)
        self.record(node.id)
        return node

    async def check(self, session: Session) -> Node:
        """
        The same without counting. Raises `TemporaryError` with code `no_node` if no node fits, and
        `PermanentError` with code `volume_elsewhere` if the session has a volume on the disk of the
        node that it must leave.
        """
        request = await self.request_of(session)
        if request.node_id == session.runtime_node:
            raise PermanentError(
                f"Session {session.id} cannot leave node {session.runtime_node}: it uses a volume "
                "on the disk of that node.",
                code="volume_elsewhere",
            )
        moving = dataclasses.replace(
            request,
            exclude=frozenset({session.runtime_node}),
            pooled=False,
            shared_blobs=True,
        )
        found = await self.candidates(moving)
        if not found:
            raise TemporaryError(
                f"No other node fits session {session.id}: {await self._reasons(moving)}",
                code="no_node",
            )
        return found[0]

    async def request_of(self, session: Session) -> PlacementRequest:
        """What a session requires of its node."""
        template = await self._templates.numbered(session.template_id, session.template_version)
        volumes = [await self._store.volumes.get(mount.volume_id) for mount in session.volumes]
        return PlacementRequest(
            template=versioned_name(session.template_id, session.template_version),
            resources=session.resources,
            require=frozenset(template.require),
            features=mounts(session.workspace_mode, volumes) | template.features,
            labels=session.node_labels,
            node_id=pinned(volumes),
        )

    async def _reasons(self, request: PlacementRequest) -> str:
        words = [
            f"{node.id}: {reason_not_to_place(node, request)}"
            for node in await self._nodes()
            if node.id not in request.exclude
        ]
        return "; ".join(words[:5]) + "." if words else "there is no other node."

    async def _nodes(self) -> list[Node]:
        now = self._clock.monotonic()
        if self._read is None or now - self._read[0] >= CACHE_SECONDS:
            self._read = (now, await self._store.nodes.all())
        return [self._counted(node) for node in self._read[1]]

    def _counted(self, node: Node) -> Node:
        """The node with the sessions that it has not reported yet."""
        placed = self._placed.get(node.id, [])
        if node.seen_at is not None:
            placed = self._placed[node.id] = [at for at in placed if at >= node.seen_at]
        pool = self._ready_instances() if node.id == self._node_id else node.pool
        return dataclasses.replace(node, sessions=node.sessions + len(placed), pool=pool)

    def _alone(self, node: Node) -> Node:
        """
        The only node. It accepts sessions up to `node.max_sessions`, because no other node can take
        them; its driver reports problems more precisely than a probe.
        """
        return dataclasses.replace(
            node, max_sessions=self._settings.max_sessions, metrics=None, problem=None
        )


def pinned(volumes: Iterable[Volume | None]) -> str | None:
    """The node that has one of these volumes on its disk, if any."""
    return next(
        (volume.node_id for volume in volumes if volume is not None and volume.node_id is not None),
        None,
    )


def mounts(mode: WorkspaceMode, volumes: Iterable[Volume | None]) -> frozenset[str]:
    """The feature that mounts from the bucket require."""
    of_bucket = any(volume is not None and volume.kind == S3 for volume in volumes)
    return frozenset({MOUNT} if of_bucket or mode is WorkspaceMode.MOUNT else ())
