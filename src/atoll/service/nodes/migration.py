"""
Sessions that go on on another node: the record first, then whoever is to see to it is told.

A move is one compare-and-set, so of two who move a session, or of one who moves it and one who
starts it where it is, one is refused and has done nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict
from atoll.model import plan
from atoll.model.event import session_event
from atoll.model.session import Warning
from atoll.service.nodes.service import node_topic
from atoll.service.sessions.records import settle_topic

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.model.session import Cause, Session
    from atoll.service.placement.service import Placement
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

WAITS = "waits_for_node"
"""Code of the warning of a session that cannot go on elsewhere."""


class Migrations:
    def __init__(
        self, store: Store, placements: Placement, coordination: Coordination, clock: Clock
    ) -> None:
        self._store = store
        self._placements = placements
        self._coordination = coordination
        self._clock = clock
        self.moved: dict[str, int] = {}
        """How many sessions this process has moved, by cause."""

    async def move(self, session: Session, cause: Cause) -> str | None:
        """
        Put it on another node; the node's id, or None when it has changed meanwhile. Who called
        tells both nodes. Raises what `Placements.assign` does.
        """
        node = await self._placements.assign(session)
        now, left = self._clock.now(), session.runtime_node
        found = plan.moved(session, node, now)
        found = dataclasses.replace(
            found,
            warnings=tuple(item for item in found.warnings if item.code != WAITS),
        )
        try:
            await self._store.sessions.save(found, event=session_event(found, now, "moved"))
        except Conflict:
            return None
        self.count(cause)
        log.info("session.moved", session_id=session.id, node=node.id, left=left, cause=cause.value)
        return node.id

    def count(self, cause: Cause) -> None:
        self.moved[cause.value] = self.moved.get(cause.value, 0) + 1

    async def notify(self, left: str, to: set[str]) -> None:
        """Tell the nodes that sessions have come to, and the one that they have left."""
        for node_id in sorted(to):
            await self._coordination.notify(settle_topic(node_id))
        if to:
            await self._coordination.notify(node_topic(left))

    async def keep_waiting(self, session: Session, why: str) -> None:
        """Say of a session that it waits for its node."""
        if any(item.code == WAITS for item in session.warnings):
            return
        warnings = (*session.warnings, Warning(WAITS, why))
        await self._warn(session, warnings)

    async def wait_no_more(self, session: Session) -> None:
        if any(item.code == WAITS for item in session.warnings):
            warnings = tuple(item for item in session.warnings if item.code != WAITS)
            await self._warn(session, warnings)

    async def _warn(self, session: Session, warnings: tuple[Warning, ...]) -> None:
        try:
            await self._store.sessions.save(dataclasses.replace(session, warnings=warnings))
        except Conflict:
            log.info("session.not_warned", session_id=session.id)  # The next turn does.
