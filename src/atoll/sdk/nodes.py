"""Nodes: the machines and Docker engines that host instances."""

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
"""Seconds between two polls of a drain."""


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
        """Place no new sessions on the node. Existing sessions stay."""
        return await self._post(node_id, "cordon")

    async def uncordon(self, node_id: str) -> NodeInfo:
        """Allow new sessions again. Also ends a drain."""
        return await self._post(node_id, "uncordon")

    async def drain(self, node_id: str) -> NodeInfo:
        """
        Move the sessions of the node, with their files, to other nodes. Returns at once; follow
        the progress with `follow_drain`, or in `NodeInfo.drain`. Raises `Conflict` with the code
        `drain_unavailable` if sessions cannot move.
        """
        return await self._post(node_id, "drain")

    async def follow_drain(
        self, node_id: str, *, timeout: float | None = None
    ) -> AsyncIterator[NodeInfo]:
        """
        Yield the node whenever its drain progresses, until all sessions have left or the node is
        uncordoned. Raises `TimeoutError` after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        last: DrainInfo | None = None
        while True:
            node = await self.get(node_id)
            if node.drain != last or node.drain is None:
                last = node.drain
                yield node
            if last is None or last.left == 0:
                return
            if deadline is not None and loop.time() >= deadline:
                raise TimeoutError(f"Node {node_id} still has {last.left} session(s).")
            await asyncio.sleep(DRAIN_POLL_INTERVAL)

    async def delete(self, node_id: str) -> None:
        """Remove a lost or drained node. Raises `Conflict` while it has sessions."""
        await self._http.call("DELETE", f"nodes/{url_segment(node_id)}")

    async def _post(self, node_id: str, verb: str) -> NodeInfo:
        answer = await self._http.call("POST", f"nodes/{url_segment(node_id)}/{verb}")
        return decode(NodeInfo, answer)

    async def health(self, node_id: str) -> NodeHealth:
        """Health of the node, and the isolation that it provides."""
        answer = await self._http.call("GET", f"runtimes/{url_segment(node_id)}/health")
        return decode(NodeHealth, answer)

    async def metrics(self, node_id: str) -> NodeMetrics:
        answer = await self._http.call("GET", f"runtimes/{url_segment(node_id)}/metrics")
        return decode(NodeMetrics, answer)
