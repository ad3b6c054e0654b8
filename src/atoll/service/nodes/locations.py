"""
Finds the node that has a session, and so the node that answers a request.

The location of some thousands of sessions is cached. The store is the truth: callers look a
location up again (`fresh`) when it turns out to be wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import structlog

from atoll.errors import PermanentError, TemporaryError
from atoll.model.session import Cause

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.service.nodes.migration import Migrations
    from atoll.service.nodes.peers import Peers
    from atoll.service.replica import Replica
    from atoll.service.sessions.connections import Connections

log = structlog.get_logger(__name__)

CACHE_SIZE = 10_000
ANY_NODE = ""


class SessionLocations:
    def __init__(
        self,
        replica: Replica,
        peers: Peers,
        connections: Connections,
        migrations: Migrations,
        *,
        shared_blobs: bool,
    ) -> None:
        """`shared_blobs` is whether all nodes can read the blobs of this one."""
        self._node_id = replica.node_id
        self._store = replica.store
        self._peers = peers
        self._connections = connections
        self._migrations = migrations
        self._shared_blobs = shared_blobs
        self._nodes = LruCache(CACHE_SIZE)
        """Node of a session."""
        self._sessions = LruCache(CACHE_SIZE)
        """Session of an execution."""

    def is_connected(self, session_id: str) -> bool:
        """Whether this process has a link to the session at this moment."""
        return self._connections.reachable(session_id) is not None

    async def node_of(self, session_id: str, *, fresh: bool = False) -> str | None:
        """The other node that has a session; null if it is this node, or there is no session."""
        if self.is_connected(session_id):
            return None
        if not fresh:
            known = self._nodes.get(session_id)
            if known is not None:
                return known
        session = await self._store.sessions.get(session_id)
        if session is None or session.runtime_node == self._node_id:
            self._nodes.drop(session_id)
            return None
        self._nodes.put(session_id, session.runtime_node)
        return session.runtime_node

    async def session_of_execution(self, execution_id: str) -> str | None:
        """The session whose node answers for an execution; null if any node can."""
        known = self._sessions.get(execution_id)
        if known is None:
            execution = await self._store.executions.get(execution_id)
            if execution is None:
                return None
            known = self._answers_for(execution)
            self._sessions.put(execution_id, known)
        return None if known == ANY_NODE else known

    async def session_of_invocation(self, invocation_id: str) -> str | None:
        """Like `session_of_execution`, but not cached: an invocation may continue after its end."""
        page = await self._store.executions.page(invocation_id=invocation_id, limit=1)
        if not page.items:
            return None
        return self._answers_for(page.items[0]) or None

    def _answers_for(self, execution: Execution) -> str:
        any_node = execution.status.ended and (not execution.kept or self._shared_blobs)
        return ANY_NODE if any_node else execution.session_id

    async def reroute(self, session_id: str) -> bool:
        """
        Move a session to another node because its own does not start it. False if that is not
        possible: it has an instance, or files that only its node has.
        """
        session = await self._store.sessions.get(session_id)
        if (
            session is None
            or not session.status.stopped_or_archived
            or session.workspace is not None
        ):
            return False
        left = self._peers.get(session.runtime_node)
        if left is not None and not left.shared_blobs:
            return False
        try:
            node_id = await self._migrations.move(session, Cause.NODE_LOST)
        except (PermanentError, TemporaryError) as error:
            log.info("session.not_moved", session_id=session_id, error=error.message)
            return False
        if node_id is not None:
            await self._migrations.notify(session.runtime_node, {node_id})
        return True  # Possibly by another replica, which was faster.


class LruCache:
    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def put(self, key: str, value: str) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)

    def drop(self, key: str) -> None:
        self._values.pop(key, None)
