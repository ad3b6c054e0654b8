"""
Whether this node takes one more session.

Others decide by what it last told of itself; the last word is its own. Nobody is let in while it is
cordoned, or beyond `node.max_sessions`, whoever asks and whichever way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import NodeFull, TemporaryError
from atoll.model.session import WITH_INSTANCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.settings import NodeSettings
    from atoll.stores.base import Store

REMEMBERED_SECONDS = 1.0
RETRY_SECONDS = 5.0


class Admission:
    def __init__(self, store: Store, clock: Clock, settings: NodeSettings, node_id: str) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._read: tuple[float, Node | None] | None = None
        self._coming: set[str] = set()
        """Sessions that this process makes here, and has not stored yet."""

    async def admit(self, session: Session) -> Callable[[], None]:
        """
        Refuse a session that this node takes no more of, or was not to have; what to call when it
        is stored, or will not be. Until then it counts here, since nobody else knows of it.
        """
        own = await self._own()
        if own is not None and (own.cordoned or own.drain is not None):
            raise TemporaryError(
                f"Node {own.id} takes no new sessions.",
                code="node_cordoned",
                retry_after=RETRY_SECONDS,
            )
        labels = self._settings.labels
        if any(labels.get(name) != value for name, value in session.node_labels.items()):
            raise TemporaryError(
                f"Node {self._node_id} does not have the labels that are asked for.",
                code="no_node",
                retry_after=RETRY_SECONDS,
            )
        if self._settings.max_sessions is None:
            return lambda: None
        # Those that come now see this one, which sees those that came before.
        self._coming.add(session.id)
        try:
            await self._check_room(len(self._coming))
        except BaseException:
            self._coming.discard(session.id)
            raise
        return lambda: self._coming.discard(session.id)

    async def readmit(self, session: Session) -> None:
        """
        Refuse an instance to a session at rest when there is no room for one. A cordon is not for
        it: it has been here before.
        """
        if self._settings.max_sessions is not None:
            await self._check_room(len(self._coming) + 1)

    async def _check_room(self, coming: int) -> None:
        most = self._settings.max_sessions
        if most is not None and await self._instances() + coming > most:
            raise NodeFull(
                f"Node {self._node_id} has {most} sessions, and takes no more.",
                retry_after=RETRY_SECONDS,
            )

    async def _own(self) -> Node | None:
        now = self._clock.monotonic()
        if self._read is None or now - self._read[0] >= REMEMBERED_SECONDS:
            self._read = (now, await self._store.nodes.get(self._node_id))
        return self._read[1]

    async def _instances(self) -> int:
        counts = [
            await self._store.sessions.count(status, node_id=self._node_id)
            for status in WITH_INSTANCE
        ]
        return sum(counts)
