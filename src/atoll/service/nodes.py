"""Nodes: this machine, for now the only one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import NotFound
from atoll.model.session import SessionStatus

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.instance import Capabilities
    from atoll.model.node import Node, NodeMetrics
    from atoll.service.pool import Pool
    from atoll.stores.base import Store


WITH_INSTANCE = (
    SessionStatus.CREATING,
    SessionStatus.STARTING,
    SessionStatus.RESTORING,
    SessionStatus.RUNNING,
    SessionStatus.PAUSING,
    SessionStatus.PAUSED,
    SessionStatus.STOPPING,
)


def edition(template_id: str, number: int) -> str:
    return f"{template_id}@{number}"


@dataclass(frozen=True, slots=True)
class NodeView:
    node: Node
    status: str
    problem: str | None
    """Why it is not healthy."""
    metrics: NodeMetrics
    session_count: int
    pool: dict[str, int]
    seen_at: datetime
    capabilities: Capabilities


class Nodes:
    def __init__(self, node: Node, store: Store, driver: Driver, pool: Pool, clock: Clock) -> None:
        self._node = node
        self._store = store
        self._driver = driver
        self._pool = pool
        self._clock = clock

    async def list(self) -> list[NodeView]:
        return [await self.get(self._node.id)]

    async def get(self, node_id: str) -> NodeView:
        if node_id != self._node.id:
            raise NotFound(f"No node has the id {node_id}.", code="runtime_not_found")
        problem = await self._driver.health()
        return NodeView(
            node=self._node,
            status="unhealthy" if problem else "healthy",
            problem=problem,
            metrics=await self._driver.metrics(),
            session_count=await self._store.sessions.count(SessionStatus.RUNNING),
            pool=self._pool.sizes(),
            seen_at=self._clock.now(),
            capabilities=self._driver.capabilities,
        )
