"""Nodes: the places that host instances."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.paths import url_segment
from atoll.sdk.values import DrainInfo, NodeHealth, NodeInfo, NodeMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient


DRAIN_POLL_INTERVAL = 0.5
"""Time between two looks at a drain."""


class AsyncNodes:
    """All nodes of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list(self) -> AsyncIterator[NodeInfo]:
        async for item in self._http.pages("nodes"):
            yield decode(NodeInfo, item)

    async def get(self, node_id: str) -> NodeInfo:
        return decode(NodeInfo, await self._http.call("GET", f"nodes/{url_segment(node_id)}"))

    async def cordon(self, node_id: str) -> NodeInfo:
        """Give it no new sessions; those that it has stay."""
        return await self._post(node_id, "cordon")

    async def uncordon(self, node_id: str) -> NodeInfo:
        """Give it sessions again; this ends a drain."""
        return await self._post(node_id, "uncordon")

    async def drain(self, node_id: str) -> NodeInfo:
        """
        Have its sessions go on on other nodes, with their files. This returns at once; `drain` of
        the node tells how far it is, and `follow_drain` goes on telling. Raises `Conflict` with
        code `drain_unavailable` where that cannot be.
        """
        return await self._post(node_id, "drain")

    async def follow_drain(
        self, node_id: str, *, timeout: float | None = None
    ) -> AsyncIterator[NodeInfo]:
        """
        The node each time its drain has got further, until all sessions have left or somebody ends
        it. Raises `TimeoutError` when that takes longer than `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        told: DrainInfo | None = None
        while True:
            node = await self.get(node_id)
            if node.drain != told or node.drain is None:
                told = node.drain
                yield node
            if told is None or told.left == 0:
                return
            if until is not None and loop.time() >= until:
                raise TimeoutError(f"Node {node_id} has {told.left} sessions still.")
            await asyncio.sleep(DRAIN_POLL_INTERVAL)

    async def delete(self, node_id: str) -> None:
        """Forget a node that is lost or drained; raises `Conflict` while it has sessions."""
        await self._http.call("DELETE", f"nodes/{url_segment(node_id)}")

    async def _post(self, node_id: str, verb: str) -> NodeInfo:
        answer = await self._http.call("POST", f"nodes/{url_segment(node_id)}/{verb}")
        return decode(NodeInfo, answer)

    async def health(self, node_id: str) -> NodeHealth:
        """Whether the node is well, and what isolation it can give."""
        answer = await self._http.call("GET", f"runtimes/{url_segment(node_id)}/health")
        return decode(NodeHealth, answer)

    async def metrics(self, node_id: str) -> NodeMetrics:
        answer = await self._http.call("GET", f"runtimes/{url_segment(node_id)}/metrics")
        return decode(NodeMetrics, answer)
