"""Nodes: the places that host instances (`runtimes` on the wire)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.paths import segment
from atoll.sdk.values import NodeHealth, NodeInfo, NodeMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.connection import Connection


class AsyncNodes:
    """All nodes of the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self) -> AsyncIterator[NodeInfo]:
        async for item in self._connection.pages("runtimes"):
            yield decode(NodeInfo, item)

    async def health(self, node_id: str) -> NodeHealth:
        """Whether the node is well, and what isolation it can give."""
        answer = await self._connection.call("GET", f"runtimes/{segment(node_id)}/health")
        return decode(NodeHealth, answer)

    async def metrics(self, node_id: str) -> NodeMetrics:
        answer = await self._connection.call("GET", f"runtimes/{segment(node_id)}/metrics")
        return decode(NodeMetrics, answer)
