"""
Which node a session goes to, by what is known of the nodes at the moment.

Nodes are read at most once a second. What was given to one since it last told of itself is counted
on top of what it told, so that many that come at once are not all given to the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import PermanentError, TemporaryError
from atoll.model.node import versioned_name
from atoll.model.placement import MOUNT, PlacementRequest, rank, unfit
from atoll.model.session import WITH_INSTANCE, WorkspaceMode
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

REMEMBERED_SECONDS = 1.0


class Placement:
    def __init__(
        self,
        store: Store,
        templates: Templates,
        clock: Clock,
        settings: NodeSettings,
        node_id: str,
        pool: Callable[[], dict[str, int]],
    ) -> None:
        """`pool` tells how many instances are ready on this node, by template."""
        self._store = store
        self._templates = templates
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._pool = pool
        self._read: tuple[float, list[Node]] | None = None
        self._given: dict[str, list[datetime]] = {}
        """When sessions were given to a node, by its id."""

    async def candidates(self, demand: PlacementRequest) -> list[Node]:
        """The nodes that fit, best first; none when none does."""
        found = self._ranked(await self._nodes(), demand)
        if not found:
            # Those that are said to be full may not be any more.
            self.forget()
            found = self._ranked(await self._recounted(), demand)
        return found

    def _ranked(self, nodes: list[Node], demand: PlacementRequest) -> list[Node]:
        if [node.id for node in nodes] == [self._node_id]:
            nodes = [self._alone(nodes[0])]
        return rank(nodes, demand, spread_above=self._settings.spread_above)

    async def _recounted(self) -> list[Node]:
        """The nodes with as many sessions as the store knows of at this moment."""
        self._given.clear()
        nodes = []
        for node in await self._nodes():
            counts = [
                await self._store.sessions.count(status, node_id=node.id)
                for status in WITH_INSTANCE
            ]
            nodes.append(dataclasses.replace(node, sessions=sum(counts)))
        return nodes

    def gave(self, node_id: str) -> None:
        """A session was given to it, of which it has not told yet."""
        self._given.setdefault(node_id, []).append(self._clock.now())

    def forget(self) -> None:
        """Read the nodes anew: something is known to have changed."""
        self._read = None

    async def assign(self, session: Session) -> Node:
        """The node for a session that has to leave its own; it counts there from now on."""
        node = await self.check(session)
        self.gave(node.id)
        return node

    async def check(self, session: Session) -> Node:
        """
        The same without counting. `TemporaryError` with code `no_node` when none fits,
        `PermanentError` with code `volume_elsewhere` when a volume of it is on the disk of the node
        that it is to leave.
        """
        demand = await self.demand(session)
        if demand.node_id == session.runtime_node:
            raise PermanentError(
                f"Session {session.id} has a volume on the disk of {session.runtime_node}, and "
                "cannot go on elsewhere.",
                code="volume_elsewhere",
            )
        moving = dataclasses.replace(
            demand,
            exclude=frozenset({session.runtime_node}),
            pooled=False,
            shared_blobs=True,
        )
        found = await self.candidates(moving)
        if not found:
            raise TemporaryError(
                f"No other node can take session {session.id}: {await self._why(moving)}",
                code="no_node",
            )
        return found[0]

    async def demand(self, session: Session) -> PlacementRequest:
        """What a session asks of its node."""
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

    async def _why(self, demand: PlacementRequest) -> str:
        words = [
            f"{node.id}: {unfit(node, demand)}"
            for node in await self._nodes()
            if node.id not in demand.exclude
        ]
        return "; ".join(words[:5]) + "." if words else "there is none."

    async def _nodes(self) -> list[Node]:
        now = self._clock.monotonic()
        if self._read is None or now - self._read[0] >= REMEMBERED_SECONDS:
            self._read = (now, await self._store.nodes.all())
        return [self._counted(node) for node in self._read[1]]

    def _counted(self, node: Node) -> Node:
        """The node with what it has not told yet."""
        given = self._given.get(node.id, [])
        if node.seen_at is not None:
            given = self._given[node.id] = [at for at in given if at >= node.seen_at]
        pool = self._pool() if node.id == self._node_id else node.pool
        return dataclasses.replace(node, sessions=node.sessions + len(given), pool=pool)

    def _alone(self, node: Node) -> Node:
        """
        The only node: nothing is gained by sparing it, so how much it takes is what somebody set,
        and what it cannot make its driver says better.
        """
        return dataclasses.replace(
            node, max_sessions=self._settings.max_sessions, metrics=None, problem=None
        )


def pinned(volumes: Iterable[Volume | None]) -> str | None:
    """The node that has one of these volumes on its disk."""
    return next(
        (volume.node_id for volume in volumes if volume is not None and volume.node_id is not None),
        None,
    )


def mounts(mode: WorkspaceMode, volumes: Iterable[Volume | None]) -> frozenset[str]:
    """The feature that a workspace or volumes in the bucket need."""
    of_bucket = any(volume is not None and volume.kind == S3 for volume in volumes)
    return frozenset({MOUNT} if of_bucket or mode is WorkspaceMode.MOUNT else ())
