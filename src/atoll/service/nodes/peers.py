"""
The other nodes, as this control plane reaches them.

What is known of nodes is read again now and then, and when one says that it has come. Where a
session is, is remembered for some thousands of them, and looked up anew when it turns out wrong:
the database is the truth. As long as no other node is known nothing here costs anything.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING

import httpx
import structlog

from atoll.errors import NodeUnreachable, PermanentError, TemporaryError
from atoll.model.node import NodeStatus
from atoll.model.session import Cause
from atoll.service.nodes.forward_token import Content, ForwardToken

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.model.execution import Execution
    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.service.nodes.forward_token import ForwardTokens
    from atoll.service.nodes.migration import Migrations
    from atoll.service.sessions.connections import Connections
    from atoll.settings import NodeSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

TOPIC = "nodes"
"""Told when a node has come, or is at another address."""
HEADER = "Atoll-Hop"
REMEMBERED = 10_000
"""Sessions, and executions, whose places are remembered."""
KEPT_OPEN = 64
"""Connections that wait for the next request; others close theirs after 75 seconds."""
KEPT_SECONDS = 30.0
FIRST_LOOKS = 0.5
"""Seconds between two looks until this node is known itself."""
AGAIN_SECONDS = 1.0
"""Nodes are not looked for more often than this because one did not answer."""
ANYWHERE = ""

caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""The Authorization header of the request that is being answered, where nodes ask each other."""

CONNECT_TIMEOUT = 5.0
"""Seconds within which another node must accept a connection."""


class Places:
    """A bounded memory of where things are, the least recently used forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: str, place: str) -> None:
        self._kept[key] = place
        self._kept.move_to_end(key)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def drop(self, key: str) -> None:
        self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)


class Peers:
    def __init__(
        self,
        store: Store,
        connections: Connections,
        migrations: Migrations,
        coordination: Coordination,
        clock: Clock,
        settings: NodeSettings,
        node_id: str,
        forward_tokens: ForwardTokens,
        *,
        shared_blobs: bool,
    ) -> None:
        self._store = store
        self._connections = connections
        self._coordination = coordination
        self._clock = clock
        self._settings = settings
        self._migrations = migrations
        self._shared_blobs = shared_blobs
        self._forward_tokens = forward_tokens
        self._others: dict[str, Node] = {}
        self._own: Node | None = None
        self._announced = False
        self._looked = float("-inf")
        self._looking = asyncio.Lock()
        self._news = asyncio.Event()
        """Set, and replaced, whenever nodes were looked at."""
        self._sessions = Places(REMEMBERED)
        self._executions = Places(REMEMBERED)
        self._client: httpx.AsyncClient | None = None
        self.tls: ssl.SSLContext | None = None
        self.node_id = node_id

    # Nodes

    @property
    def alone(self) -> bool:
        """Whether no other node is known."""
        return not self._others

    @property
    def client(self) -> httpx.AsyncClient:
        assert self._client is not None, "no other node is known"
        return self._client

    @property
    def connect_timeout(self) -> float:
        return CONNECT_TIMEOUT

    @property
    def handshake_timeout(self) -> float:
        return self.connect_timeout + self._settings.probe_timeout.total_seconds()

    def reached(self, node_id: str) -> Node | None:
        """Another node, unless it is not known or known not to answer."""
        node = self._others.get(node_id)
        return node if node is not None and node.status is NodeStatus.HEALTHY else None

    def node(self, node_id: str) -> Node | None:
        """What was last read of a node, this one or another."""
        return self._own if node_id == self.node_id else self._others.get(node_id)

    async def lost(self, node_id: str) -> None:
        """Until a node is known not to answer any more."""
        while self.reached(node_id) is not None:
            await self._news.wait()

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(TOPIC) as heard:
                    while True:
                        await self.look()
                        await self._announce()
                        await heard.wait(self._look_pause())
            except TemporaryError as error:
                log.info("peers.not_read", error=error.message)
            except Exception as error:
                log.error("peers.not_read", exc_info=error)
            await self._look_unheard()

    def _look_pause(self) -> float:
        interval = self._settings.probe.total_seconds()
        return interval if self._announced else min(interval, FIRST_LOOKS)

    async def _look_unheard(self) -> None:
        """While nobody can be heard: the database tells all the same."""
        await asyncio.sleep(min(self._look_pause(), AGAIN_SECONDS))
        try:
            await self.look(again=False)
        except TemporaryError as error:
            log.info("peers.not_read", error=error.message)

    async def look(self, *, again: bool = True) -> None:
        """Read what is known of nodes; without `again`, unless that was done a moment ago."""
        async with self._looking:
            if not again and self._clock.monotonic() - self._looked < AGAIN_SECONDS:
                return
            nodes = {node.id: node for node in await self._store.nodes.all()}
            self._own = nodes.pop(self.node_id, None)
            if nodes and self._client is None:
                # Reading the certificates that are trusted takes a while.
                self.tls = await asyncio.to_thread(_trust, self._settings)
                self._client = _client(self.tls, self.connect_timeout)
            self._others = nodes
            self._looked = self._clock.monotonic()
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def _announce(self) -> None:
        """Have the others look as soon as this node can be found at its address."""
        if self._announced or self._own is None:
            return
        await self._coordination.tell(TOPIC)
        self._announced = True

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    # Hops

    def hop(self, hop: ForwardToken, method: str, target: bytes) -> str:
        """The header of a request that is forwarded to a node."""
        return self._forward_tokens.make(hop, method, target)

    async def read_hop(self, header: str, method: str, target: bytes) -> ForwardToken:
        return await asyncio.to_thread(self._forward_tokens.read, header, method, target)

    # Where things are

    async def node_of(self, session_id: str, *, anew: bool = False) -> str | None:
        """The other node that has a session; None when it is here, or nowhere."""
        if self._connections.reachable(session_id) is not None:
            return None
        if not anew:
            known = self._sessions.get(session_id)
            if known is not None:
                return known
        session = await self._store.sessions.get(session_id)
        if session is None or session.runtime_node == self.node_id:
            self._sessions.drop(session_id)
            return None
        self._sessions.keep(session_id, session.runtime_node)
        return session.runtime_node

    def at_hand(self, session_id: str) -> bool:
        """Whether this process has a link to the session right now."""
        return self._connections.reachable(session_id) is not None

    async def session_of(self, execution_id: str) -> str | None:
        """The session whose node answers for an execution; None when any node can."""
        known = self._executions.get(execution_id)
        if known is None:
            execution = await self._store.executions.get(execution_id)
            if execution is None:
                return None
            known = self._answers_for(execution)
            self._executions.keep(execution_id, known)
        return None if known == ANYWHERE else known

    async def session_of_invocation(self, invocation_id: str) -> str | None:
        """The same for an invocation, which may go on after its end."""
        page = await self._store.executions.page(invocation_id=invocation_id, limit=1)
        if not page.items:
            return None
        return self._answers_for(page.items[0]) or None

    def _answers_for(self, execution: Execution) -> str:
        at_hand = not execution.kept or self._shared_blobs
        return ANYWHERE if execution.status.ended and at_hand else execution.session_id

    async def reroute(self, session_id: str) -> bool:
        """
        Give a session that is at rest, with its files in the blob store alone, to another node than
        its own, which does not take it. False when it cannot go.
        """
        session = await self._store.sessions.get(session_id)
        if session is None or not session.status.at_rest or session.workspace is not None:
            return False
        left = self.node(session.runtime_node)
        if left is not None and not left.shared_blobs:
            return False
        try:
            node_id = await self._migrations.move(session, Cause.NODE_LOST)
        except (PermanentError, TemporaryError) as error:
            log.info("session.not_moved", session_id=session_id, error=error.message)
            return False
        if node_id is not None:
            await self._migrations.tell(session.runtime_node, {node_id})
        return True  # Or somebody else was quicker.

    # What one node asks of another

    async def save(self, session: Session) -> None:
        """
        Have the session's node save its files now. Where that does not answer, what it saved last
        will have to do.
        """
        node = self.reached(session.runtime_node)
        if node is None:
            return
        path = f"/api/v1/sessions/{session.id}/checkpoint"
        hop = ForwardToken(node.id, "http", Content.of(b""))
        headers = {HEADER: self.hop(hop, "POST", path.encode())}
        authorization = caller.get()
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            answer = await self._asked(node.id, self.client.post(node.url + path, headers=headers))
        except httpx.TransportError as error:
            log.warning("peer.not_saved", session_id=session.id, node_id=node.id, error=str(error))
            return
        if answer is None or answer.is_success or answer.status_code == httpx.codes.NOT_FOUND:
            return
        raise NodeUnreachable(
            f"Node {node.id} could not save session {session.id} ({answer.status_code}).",
        )

    async def _asked(
        self, node_id: str, asking: Coroutine[None, None, httpx.Response]
    ) -> httpx.Response | None:
        """The answer; None when the node was lost meanwhile."""
        asked, lost = asyncio.ensure_future(asking), asyncio.ensure_future(self.lost(node_id))
        try:
            await asyncio.wait([asked, lost], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            for task in (asked, lost):
                task.cancel()
            await asyncio.gather(asked, lost, return_exceptions=True)


def _trust(settings: NodeSettings) -> ssl.SSLContext:
    if settings.ca_file is not None:
        return ssl.create_default_context(cafile=settings.ca_file)
    return httpx.create_ssl_context()


def _client(tls: ssl.SSLContext, connect_timeout: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        verify=tls,
        # Neither a proxy nor a netrc of the environment is for what nodes tell each other.
        trust_env=False,
        # What is asked may take as long as it likes, or never end; who is lost is known otherwise.
        timeout=httpx.Timeout(None, connect=connect_timeout),
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=KEPT_OPEN,
            keepalive_expiry=KEPT_SECONDS,
        ),
    )
