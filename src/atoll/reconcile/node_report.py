"""
Reports the state of this node, regularly and when its pool or templates have changed.

A node learns from its own record that it counted as lost, even if it was only unreachable, and
removes what it still has of sessions that have moved.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.model.node import NodeHealth
from atoll.service.nodes.service import node_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.reconcile.moved_sessions import MovedSessions
    from atoll.service.nodes.service import Nodes
    from atoll.service.replica import Replica
    from atoll.settings import NodeSettings

log = structlog.get_logger(__name__)

CHECK_INTERVAL = 1.0
"""Seconds between two checks whether the pool or the templates have changed."""


class NodeReport:
    """Reports this node regularly, and when its pool or templates have changed."""

    def __init__(
        self,
        replica: Replica,
        nodes: Nodes,
        moved: MovedSessions,
        settings: NodeSettings,
        pool_sizes: Callable[[], dict[str, int]],
    ) -> None:
        self._nodes = nodes
        self._moved = moved
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._interval = settings.probe.total_seconds()
        self._pool_sizes = pool_sizes
        self._reported: dict[str, int] | None = None
        self._due = float("-inf")
        self._lost = True
        """Whether other nodes may consider this one lost, and may have moved its sessions."""
        self._templates_changed = False

    def templates_changed(self) -> None:
        self._templates_changed = True

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(node_topic(self._nodes.id)) as subscription:
                    while True:
                        notified = await subscription.wait(min(self._interval, CHECK_INTERVAL))
                        await self.once(notified=notified)
            except TemporaryError as error:
                self._lost = True
                log.warning("report.failed", code=error.code, error=error.message)
            except Exception as error:
                log.error("report.failed", exc_info=error)
            await asyncio.sleep(min(self._interval, CHECK_INTERVAL))

    async def once(self, *, notified: bool) -> None:
        """`notified`: another replica has changed the record of this node."""
        now = self._clock.monotonic()
        if self._templates_changed:
            self._templates_changed = False
            self._nodes.local.templates_changed()
            self._due = now
        if not notified and now < self._due and self._pool_sizes() == self._reported:
            return
        # The record may have changed while no notification could arrive.
        self._lost |= now - self._due > self._interval
        self._reported = self._pool_sizes()
        node = await self._nodes.report()
        self._due = now + self._interval
        lost = node.status is NodeHealth.UNHEALTHY
        # Once more when the node is healthy again: the last sessions may have just moved.
        if lost or self._lost or notified or node.drain is not None:
            await self._moved.once()
        self._lost = lost
