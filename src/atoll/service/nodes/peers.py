"""
The other nodes that this replica can reach, and the HTTP client with which it reaches them.

Nodes are read from the store periodically, and whenever a node announces itself. A replica that
knows no other node opens no client, and does not even import it.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.model.node import NodeHealth

if TYPE_CHECKING:
    import httpx

    from atoll.model.node import Node
    from atoll.service.nodes.forward_token import ForwardToken, ForwardTokens
    from atoll.service.replica import Replica
    from atoll.settings import NodeSettings

log = structlog.get_logger(__name__)

TOPIC = "nodes"
"""Published when a node has started or has another address."""
FORWARD_HEADER = "Atoll-Hop"
MAX_IDLE_CONNECTIONS = 64
IDLE_SECONDS = 30.0
"""How long an idle connection stays open; nodes close theirs after 75 seconds."""
FIRST_REFRESH_SECONDS = 0.5
"""Pause between two refreshes until this node itself is in the store."""
MIN_REFRESH_SECONDS = 1.0
"""Unanswered requests do not cause refreshes more often than this."""
CONNECT_TIMEOUT = 5.0


class Peers:
    def __init__(
        self, replica: Replica, settings: NodeSettings, forward_tokens: ForwardTokens
    ) -> None:
        self.node_id = replica.node_id
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._settings = settings
        self._forward_tokens = forward_tokens
        self._others: dict[str, Node] = {}
        self._own: Node | None = None
        self._announced = False
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._refreshed = asyncio.Event()
        """Set, and replaced, at every refresh."""
        self._client: httpx.AsyncClient | None = None
        self.tls: ssl.SSLContext | None = None

    @property
    def alone(self) -> bool:
        """Whether no other node is known."""
        return not self._others

    @property
    def client(self) -> httpx.AsyncClient:
        assert self._client is not None, "no other node is known"
        return self._client

    @property
    def handshake_timeout(self) -> float:
        return CONNECT_TIMEOUT + self._settings.probe_timeout.total_seconds()

    def healthy(self, node_id: str) -> Node | None:
        """Another node; null if it is unknown or unhealthy."""
        node = self._others.get(node_id)
        return node if node is not None and node.status is NodeHealth.HEALTHY else None

    def get(self, node_id: str) -> Node | None:
        """A node, this one included, as of the last refresh."""
        return self._own if node_id == self.node_id else self._others.get(node_id)

    async def wait_until_lost(self, node_id: str) -> None:
        """Return once the node is unknown or unhealthy."""
        while self.healthy(node_id) is not None:
            await self._refreshed.wait()

    def sign(self, token: ForwardToken, method: str, target: bytes) -> str:
        """Value of the header of a request that is forwarded."""
        return self._forward_tokens.make(token, method, target)

    async def verify(self, header: str, method: str, target: bytes) -> ForwardToken:
        return await asyncio.to_thread(self._forward_tokens.verify, header, method, target)

    # Refresh

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(TOPIC) as announcements:
                    while True:
                        await self.refresh()
                        await self._announce()
                        await announcements.wait(self._interval())
            except TemporaryError as error:
                log.info("peers.not_read", error=error.message)
            except Exception as error:
                log.error("peers.not_read", exc_info=error)
            await self._refresh_without_announcements()

    def _interval(self) -> float:
        interval = self._settings.probe.total_seconds()
        return interval if self._announced else min(interval, FIRST_REFRESH_SECONDS)

    async def _refresh_without_announcements(self) -> None:
        """The database may be available although the coordination is not."""
        await asyncio.sleep(min(self._interval(), MIN_REFRESH_SECONDS))
        try:
            await self.refresh(force=False)
        except TemporaryError as error:
            log.info("peers.not_read", error=error.message)

    async def refresh(self, *, force: bool = True) -> None:
        """Read the nodes from the store; without `force`, not if that was done a moment ago."""
        async with self._refreshing:
            if not force and self._clock.monotonic() - self._refreshed_at < MIN_REFRESH_SECONDS:
                return
            nodes = {node.id: node for node in await self._store.nodes.all()}
            self._own = nodes.pop(self.node_id, None)
            if nodes and self._client is None:
                # Loading the trusted certificates takes a while.
                self.tls = await asyncio.to_thread(_ssl_context, self._settings)
                self._client = _client(self.tls)
            self._others = nodes
            self._refreshed_at = self._clock.monotonic()
            refreshed, self._refreshed = self._refreshed, asyncio.Event()
            refreshed.set()

    async def _announce(self) -> None:
        """Have the others refresh as soon as the address of this node is in the store."""
        if self._announced or self._own is None:
            return
        await self._coordination.notify(TOPIC)
        self._announced = True

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _ssl_context(settings: NodeSettings) -> ssl.SSLContext:
    if settings.ca_file is not None:
        return ssl.create_default_context(cafile=settings.ca_file)
    import httpx

    return httpx.create_ssl_context()


def _client(tls: ssl.SSLContext) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        verify=tls,
        # A proxy or a netrc of the environment must not see requests between nodes.
        trust_env=False,
        # A response may take any time, or never end. `wait_until_lost` detects a lost node.
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
        ),
    )
