"""
Moves sessions to other nodes.

A move is one compare-and-set on the session's record. If two replicas move a session, or one moves
it while another starts it, one of them fails and has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.errors import VersionConflict
from atoll.model.session import Warning
from atoll.model.session_changes import WAITS_FOR_NODE, with_warnings, without_warnings
from atoll.service.nodes.service import node_topic
from atoll.service.sessions.records import settle_topic

if TYPE_CHECKING:
    from atoll.model.session import Cause, Session
    from atoll.service.placement.service import Placement
    from atoll.service.replica import Replica
    from atoll.service.sessions.records import SessionRecords

log = structlog.get_logger(__name__)


class Migrations:
    def __init__(self, replica: Replica, placement: Placement, records: SessionRecords) -> None:
        self._placement = placement
        self._records = records
        self._coordination = replica.coordination
        self.moved: dict[str, int] = {}
        """Number of sessions that this process has moved, by cause."""

    async def move(self, session: Session, cause: Cause) -> str | None:
        """
        Assign the session to another node, and return the node's id; null if the session has
        changed meanwhile. The caller then calls `notify`. Raises what `Placement.assign` raises.
        """
        node = await self._placement.assign(session)
        left = session.runtime_node
        try:
            await self._records.move(session, node)
        except VersionConflict:
            return None
        self.count(cause)
        log.info("session.moved", session_id=session.id, node=node.id, left=left, cause=cause.value)
        return node.id

    def count(self, cause: Cause) -> None:
        self.moved[cause.value] = self.moved.get(cause.value, 0) + 1

    async def notify(self, left: str, to: set[str]) -> None:
        """Notify the nodes that got sessions, and the node that they left."""
        for node_id in sorted(to):
            await self._coordination.notify(settle_topic(node_id))
        if to:
            await self._coordination.notify(node_topic(left))

    async def add_warning(self, session: Session, message: str) -> None:
        """Warn that the session waits for its node."""
        if not any(item.code == WAITS_FOR_NODE for item in session.warnings):
            await self._save(with_warnings(session, Warning(WAITS_FOR_NODE, message)))

    async def remove_warning(self, session: Session) -> None:
        if any(item.code == WAITS_FOR_NODE for item in session.warnings):
            await self._save(without_warnings(session, WAITS_FOR_NODE))

    async def _save(self, session: Session) -> None:
        try:
            await self._records.save_silently(session)
        except VersionConflict:
            log.info("session.not_warned", session_id=session.id)  # The next sweep repeats it.
