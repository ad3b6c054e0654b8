"""
Decides whether this node accepts one more session.

Placement uses the last report of a node; the node itself has the final say. A cordoned node refuses
new sessions, and no node accepts more than `node.max_sessions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import NodeFull, TemporaryError
from atoll.model.session import COUNTED_ON_NODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.settings import NodeSettings
    from atoll.stores.base import Store

CACHE_SECONDS = 1.0
RETRY_SECONDS = 5.0


class Admission:
    def __init__(self, store: Store, clock: Clock, settings: NodeSettings, node_id: str) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._read: tuple[float, Node | None] | None = None
        self._pending: set[str] = set()
        """Sessions that this process is creating and has not stored yet."""

    async def admit(self, session: Session) -> Callable[[], None]:
        """
        Refuse a session if this node is cordoned, full or lacks its labels. The session counts as
        pending until the returned function is called, once it is stored or has failed.
        """
        own = await self._own()
        if own is not None and (own.cordoned or own.drain is not None):
            raise TemporaryError(
                f"Node {own.id} is cordoned and accepts no new sessions.",
                code="node_cordoned",
                retry_after=RETRY_SECONDS,
            )
        labels = self._settings.labels
        if any(labels.get(name) != value for name, value in session.node_labels.items()):
            raise TemporaryError(
                f"Node {self._node_id} does not have the requested labels.",
                code="no_node",
                retry_after=RETRY_SECONDS,
            )
        if self._settings.max_sessions is None:
            return lambda: None
        # Before the first await: concurrent calls must count each other.
        self._pending.add(session.id)
        try:
            await self._check_room(len(self._pending))
        except BaseException:
            self._pending.discard(session.id)
            raise
        return lambda: self._pending.discard(session.id)

    async def readmit(self, session: Session) -> None:
        """
        Refuse to start a session at rest if the node is full. A cordon does not apply: the session
        already belongs to this node.
        """
        if self._settings.max_sessions is not None:
            await self._check_room(len(self._pending) + 1)

    async def _check_room(self, pending: int) -> None:
        most = self._settings.max_sessions
        if most is not None and await self._instances() + pending > most:
            raise NodeFull(
                f"Node {self._node_id} is full: it has {most} sessions.",
                retry_after=RETRY_SECONDS,
            )

    async def _own(self) -> Node | None:
        now = self._clock.monotonic()
        if self._read is None or now - self._read[0] >= CACHE_SECONDS:
            self._read = (now, await self._store.nodes.get(self._node_id))
        return self._read[1]

    async def _instances(self) -> int:
        counts = [
            await self._store.sessions.count(status, node_id=self._node_id)
            for status in COUNTED_ON_NODE
        ]
        return sum(counts)
