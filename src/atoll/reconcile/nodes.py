"""
Probes all nodes, and moves sessions away from lost ones.

One replica, the holder of a lease, probes all nodes. A node that fails several probes in a row is
lost: it gets no new work, and its sessions move to other nodes, a batch at a time. It is healthy
again with the first successful probe.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, PermanentError
from atoll.model.event import Event
from atoll.model.node import NodeHealth, health_after_probe
from atoll.model.session import Cause
from atoll.reconcile.concurrency import for_each
from atoll.reconcile.sweep import exclusively, sweep
from atoll.service.nodes.service import node_topic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.service.nodes.migration import Migrations
    from atoll.service.nodes.probe import NodeProbe
    from atoll.service.nodes.service import Nodes
    from atoll.service.replica import Replica
    from atoll.settings import NodeSettings

log = structlog.get_logger(__name__)

BATCH = 50
"""Sessions that move between two checks whether their node is still lost."""
CONCURRENCY = 8
PROBE_CONCURRENCY = 32
"""Nodes that are probed at the same time."""


class NodeMonitor:
    """Finds lost nodes and moves their sessions."""

    def __init__(
        self,
        replica: Replica,
        nodes: Nodes,
        probe: NodeProbe,
        migrations: Migrations,
        settings: NodeSettings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._clock = replica.clock
        self._nodes = nodes
        self._probe = probe
        self._migrations = migrations
        self._settings = settings
        self._interval = settings.probe.total_seconds()
        self._seen: dict[str, tuple[datetime | None, float]] = {}
        """
        For each node: the time of its last report by its own clock, and the time at which this
        replica first saw it.
        """

    async def run(self) -> None:
        # The lease is held while there are sessions to move.
        await sweep(
            "probe.failed", self._interval, partial(exclusively, self._leases, "probe", self._turn)
        )

    async def _turn(self) -> None:
        while await self.once():
            pass

    async def once(self) -> bool:
        """Probe all nodes, then move sessions until the next probe is due; true if more remain."""
        until = self._clock.monotonic() + self._interval
        nodes = await self._store.nodes.all()
        found = await self._problems(nodes)
        if self._is_cut_off(nodes, found):
            log.warning("probe.disconnected", problems=len(found))
            found = {self._nodes.id: found.get(self._nodes.id)}
        for node in nodes:
            if node.id in found:
                await self._judge(node, found[node.id])
        more = False
        for node in await self._store.nodes.all():
            if node.status is NodeHealth.UNHEALTHY and len(nodes) > 1:
                more |= await self._move_sessions(node, until)
        return more

    # One node

    async def _problems(self, nodes: list[Node]) -> dict[str, str | None]:
        """The problem of each node, if it has one."""
        slots = asyncio.Semaphore(PROBE_CONCURRENCY)

        async def problem(node: Node) -> str | None:
            async with slots:
                own = node.id == self._nodes.id
                return await (self._nodes.local.problem() if own else self._probe.problem_of(node))

        problems = await asyncio.gather(*(problem(node) for node in nodes))
        return dict(zip((node.id for node in nodes), problems, strict=True))

    def _is_cut_off(self, nodes: list[Node], found: dict[str, str | None]) -> bool:
        """
        Whether this node is disconnected rather than the others lost: none of several others
        answers, although one of them has reported recently.
        """
        now = self._clock.monotonic()
        others = [node for node in nodes if node.id != self._nodes.id]
        for node in others:
            if node.id not in self._seen or self._seen[node.id][0] != node.seen_at:
                self._seen[node.id] = (node.seen_at, now)
        recently = self._interval * self._settings.unhealthy_after
        return (
            len(others) > 1
            and all(found[node.id] is not None for node in others)
            and any(now - self._seen[node.id][1] <= recently for node in others)
        )

    async def _judge(self, node: Node, problem: str | None) -> None:
        status, failures = health_after_probe(
            node, problem, unhealthy_after=self._settings.unhealthy_after
        )
        if (status, failures, problem) == (node.status, node.failures, node.problem):
            return
        event = None
        if status is not node.status:
            event = Event(f"node.{status.value}", node.id, self._clock.now(), {"problem": problem})
        written = await self._store.nodes.record_probe(
            node, status=status, failures=failures, problem=problem, event=event
        )
        if event is not None and written:
            log.warning("node.status_changed", node=node.id, status=status.value, problem=problem)
            await self._coordination.notify(node_topic(node.id))
            if status is NodeHealth.HEALTHY:
                await self._each(node, "", self._migrations.remove_warning)

    # Its sessions

    async def _move_sessions(self, node: Node, until: float) -> bool:
        """Move its sessions; true if time ran out before all were handled."""
        after = ""
        while True:
            # A node that is healthy again keeps its remaining sessions.
            now = await self._store.nodes.get(node.id)
            if now is None or now.status is not NodeHealth.UNHEALTHY or not now.shared_blobs:
                return False
            to: set[str] = set()
            after = await self._each(now, after, partial(self._move, to), limit=BATCH)
            await self._migrations.notify(node.id, to)
            await self._nodes.update_drain(node.id, None)
            if not after:
                return False
            if self._clock.monotonic() >= until:
                return True

    async def _move(self, to: set[str], session: Session) -> None:
        try:
            target = await self._migrations.move(session, Cause.NODE_LOST)
        except PermanentError as error:
            await self._migrations.add_warning(session, error.message)
        else:
            to |= set() if target is None else {target}

    async def _each(
        self,
        node: Node,
        after: str,
        work: Callable[[Session], Awaitable[None]],
        limit: int | None = None,
    ) -> str:
        """Call `work` for a node's sessions after the id `after`; the last id if there are more."""

        async def attempt(session: Session) -> None:
            try:
                await work(session)
            except AtollError as error:
                # A failure must not delay the other sessions; it is retried.
                log.warning("session.not_moved", session_id=session.id, error=error.message)
            except Exception as error:
                log.error("session.not_moved", session_id=session.id, exc_info=error)

        while batch := await self._store.sessions.unfinished(
            limit=BATCH, after=after, node_id=node.id
        ):
            await for_each(batch, attempt, at_once=CONCURRENCY)
            after = batch[-1].id
            if len(batch) < BATCH:
                return ""
            if limit is not None:
                return after
        return ""
