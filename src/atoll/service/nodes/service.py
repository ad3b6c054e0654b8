"""
Nodes: this one, as it tells of itself, and all of them, as they are known.

What another node says is as old as its last report. What this one is, is looked at when it is asked
for; how busy it is, at most once a second. A node that somebody cordoned takes no new sessions; one
that is drained gives those that it has to others, which `reconcile/drains.py` sees to.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, NotFound, TemporaryError
from atoll.model.event import Event
from atoll.model.node import Drain, Node, NodeHealth, versioned_name
from atoll.model.placement import MOUNT
from atoll.model.session import WITH_INSTANCE, SessionStatus
from atoll.model.template import TemplateStatus

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.node import NodeMetrics
    from atoll.model.template import Template
    from atoll.service.pool.service import Pool
    from atoll.service.replica import Replica
    from atoll.service.templates.builds import Builds
    from atoll.settings import Settings

FRESH_SECONDS = 1.0
"""How old the numbers of this node may be; between two looks at the CPU time must pass."""
TEMPLATES_SECONDS = 60.0
"""How long it is remembered which templates are here; what is removed is not told of."""
MOST_TEMPLATES = 500
"""Templates that a node tells that it has, newest first."""
PAGE = 100


def node_topic(node_id: str) -> str:
    """What is told when something was decided about a node, or sessions have left it."""
    return f"node.{node_id}"


class Nodes:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        builds: Builds,
        pool: Pool,
        settings: Settings,
        url: str,
    ) -> None:
        """`url` is the address of this replica, unless the settings name another."""
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self.id = replica.node_id
        self._driver = driver
        self._builds = builds
        self._settings = settings
        self._url = settings.node.url or url
        self._pool = pool
        self._metrics: tuple[float, NodeMetrics] | None = None
        self._templates: tuple[float, tuple[str, ...]] | None = None
        self.known: tuple[Node, ...] = ()
        """As they were when somebody last looked; for numbers that cost nothing."""

    # This one

    async def report(self) -> Node:
        """Tell of this node; as it is, with what others say of it."""
        nodes = {node.id: node for node in await self._store.nodes.all()}
        known, own = nodes.get(self.id), await self.own()
        event = None
        if known is None:
            event = self._event("node.registered", type=own.type, url=own.url, labels=own.labels)
        await self._store.nodes.tell(own, event=event)
        nodes[self.id] = node = own if known is None else _judged_as(own, known)
        self.known = tuple(nodes.values())
        return node

    async def own(self) -> Node:
        """This node as it is now; others' judgement of it is left out."""
        given = self._driver.capabilities
        metrics = await self._measured()
        return Node(
            id=self.id,
            type=self._driver.kind,
            url=self._url,
            labels=self._settings.node.labels,
            provides=given.provides | _features(self._driver),
            missing=given.missing,
            max_sessions=self._settings.node.max_sessions or self._held_by(metrics),
            metrics=metrics,
            sessions=await self.sessions(self.id),
            templates=await self._cached(),
            building=tuple(versioned_name(*key) for key in self._builds.building),
            pool=await self._pool.on_node(),
            shared_blobs=self._settings.blob.url is not None,
            seen_at=self._clock.now(),
            problem=await self.problem(),
        )

    async def problem(self) -> str | None:
        """Why this node can do nothing at the moment; none when it can."""
        if self._store.unavailable:
            return "its control plane does not reach the database"
        return (await self._driver.status()).problem

    async def sessions(self, node_id: str) -> int:
        """How many sessions of a node have an instance."""
        counts = [
            await self._store.sessions.count(status, node_id=node_id) for status in WITH_INSTANCE
        ]
        return sum(counts)

    def templates_changed(self) -> None:
        """Look anew which templates are here."""
        self._templates = None

    def _held_by(self, metrics: NodeMetrics) -> int:
        """How many ordinary sessions the node's memory holds."""
        return max(1, metrics.mem_total // self._settings.session.memory)

    async def _measured(self) -> NodeMetrics:
        now = self._clock.monotonic()
        if self._metrics is None or now - self._metrics[0] >= FRESH_SECONDS:
            self._metrics = (now, (await self._driver.status()).load)
        return self._metrics[1]

    async def _cached(self) -> tuple[str, ...]:
        """Templates of which all that instances need is on this node."""
        now = self._clock.monotonic()
        if self._templates is not None and now - self._templates[0] < TEMPLATES_SECONDS:
            return self._templates[1]
        found: list[str] = []
        environments: set[str] | None = None
        cursor: str | None = None
        while len(found) < MOST_TEMPLATES:
            page = await self._store.templates.page(cursor=cursor, limit=PAGE)
            for newest in page.items:
                template = await self._ready(newest)
                if template is None:
                    continue
                if template.build is not None and environments is None:
                    packages = self._driver.packages
                    listed = [] if packages is None else await packages.listed()
                    environments = {info.name for info in listed}
                try:
                    here = await self._is_here(template, environments or set())
                except TemporaryError:
                    # The driver's `status` tells; all else that is told of the node stays true.
                    return () if self._templates is None else self._templates[1]
                if here:
                    found.append(versioned_name(template.id, template.number))
            cursor = page.next_cursor
            if cursor is None:
                break
        self._templates = (now, tuple(found[:MOST_TEMPLATES]))
        return self._templates[1]

    async def _ready(self, newest: Template) -> Template | None:
        if newest.status is TemplateStatus.READY:
            return newest
        return await self._store.templates.ready(newest.id)

    async def _is_here(self, template: Template, environments: set[str]) -> bool:
        build = template.build
        if build is None:
            # One that is an image all the same is the node's own.
            has_image = self._driver.images.image_layer(template) is not None
            return not has_image or await self._driver.images.is_built(template)
        if build.environment is not None and build.environment not in environments:
            return False
        return not build.layers or await self._driver.images.is_built(template)

    # All of them

    async def list(self) -> list[Node]:
        """In order of id; this one as it is now."""
        own = await self.own()
        known = {node.id: node for node in await self._store.nodes.all()}
        known[self.id] = _shown(own, known.get(self.id, own))
        self.known = tuple(known[node_id] for node_id in sorted(known))
        return [*self.known]

    async def get(self, node_id: str, *, code: str = "node_not_found") -> Node:
        """`code` is that of the error when there is none."""
        found = await self._store.nodes.get(node_id)
        if node_id == self.id:
            own = await self.own()
            return _shown(own, found or own)
        if found is None:
            raise NotFound(f"No node has the id {node_id}.", code=code)
        return found

    async def cordon(self, node_id: str) -> Node:
        """Give it no new sessions; those that it has stay."""
        node = await self.get(node_id)
        if not node.cordoned:
            await self._store.nodes.cordon(
                node_id, True, event=self._event("node.cordoned", node_id)
            )
            await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def uncordon(self, node_id: str) -> Node:
        """Give it sessions again, and end a drain; what has left does not come back."""
        node = await self.get(node_id)
        if node.cordoned or node.drain is not None:
            # In this order: what is cordoned and not drained is a state of its own.
            await self._store.nodes.drain(node_id, None)
            await self._store.nodes.cordon(
                node_id, False, event=self._event("node.uncordoned", node_id)
            )
            await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def drain(self, node_id: str) -> Node:
        """Cordon it, and have its sessions leave."""
        node = await self.get(node_id)
        if node.drain is None:
            await self._check_others(node)
            total = await self.unended(node_id)
            await self._store.nodes.cordon(node_id, True)
            await self._store.nodes.drain(
                node_id,
                Drain(total, total),
                event=self._event("node.draining", node_id, sessions=total),
            )
        await self._coordination.notify(node_topic(node_id))
        return await self.get(node_id)

    async def tell_drain(self, node_id: str, message: str | None) -> None:
        """Write how far a drain is, and why one of its sessions cannot leave."""
        node = await self._store.nodes.get(node_id)
        if node is None or node.drain is None:
            return
        left = await self.unended(node_id)
        told = Drain(max(node.drain.total, left), left, message if left else None)
        if told == node.drain:
            return
        event = None
        if left == 0:
            event = self._event("node.drained", node_id, sessions=told.total)
        await self._store.nodes.progress(node_id, told, event=event)

    async def _check_others(self, node: Node) -> None:
        if not node.shared_blobs:
            raise Conflict(
                f"The files of sessions on {node.id} are saved on its own disk, so they cannot "
                "go on elsewhere. Keep blobs on S3 (ATOLL_BLOB__URL), or cordon the node and wait "
                "until its sessions have ended.",
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
                f"No other node is well and takes sessions, so those of {node.id} have nowhere to "
                "go.",
                code="drain_unavailable",
            )

    async def remove(self, node_id: str) -> None:
        """Forget a node that has nothing any more."""
        node = await self.get(node_id)
        if node.status is NodeHealth.HEALTHY and not node.drained:
            raise Conflict(
                f"Node {node_id} is well. Drain it first, or stop its control planes.",
                code="node_in_use",
            )
        if left := await self.unended(node_id):
            raise Conflict(
                f"Node {node_id} has {left} sessions still.", code="node_in_use", sessions=left
            )
        await self._store.nodes.remove(node_id, event=self._event("node.removed", node_id))

    async def unended(self, node_id: str) -> int:
        """How many sessions a node has that have not ended, with an instance or not."""
        counts = [
            await self._store.sessions.count(status, node_id=node_id)
            for status in SessionStatus
            if not status.ended
        ]
        return sum(counts)

    def _event(self, kind: str, node_id: str | None = None, **data: Any) -> Event:
        return Event(kind, node_id or self.id, self._clock.now(), data)


def _shown(own: Node, known: Node) -> Node:
    """What is known to be wrong here counts at once, and not only when it has lasted."""
    node = _judged_as(own, known)
    return node if own.problem is None else dataclasses.replace(node, status=NodeHealth.UNHEALTHY)


def _judged_as(own: Node, known: Node) -> Node:
    """What a node says of itself, with what others say of it."""
    return dataclasses.replace(
        own,
        problem=own.problem or (known.problem if known.status is NodeHealth.UNHEALTHY else None),
        status=known.status,
        failures=known.failures,
        cordoned=known.cordoned,
        drain=known.drain,
    )


def _features(driver: Driver) -> frozenset[str]:
    """Names of `instance.FEATURES` and of mounts that the node's driver has."""
    has = {
        "pause": driver.pausing is not None,
        "copy": driver.workspaces.can_copy,
        MOUNT: driver.volumes is not None and driver.volumes.bucket_problem() is None,
    }
    return driver.images.features | {name for name, there in has.items() if there}
