"""
Records of sessions: reads them, and writes them with their events.

Every write is a compare-and-set on the record's version. `change` repeats it on the newest record
until no other writer interferes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    NodeUnreachable,
    NotFound,
    SessionEnded,
    SessionNotRunning,
    TemporaryError,
    VersionConflict,
)
from atoll.model.event import session_event
from atoll.model.session_changes import ended, moved

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.model.node import Node
    from atoll.model.session import Cause, Session, SessionStatus
    from atoll.service.replica import Replica
    from atoll.service.sessions.observers import SessionObservers

log = structlog.get_logger(__name__)


def settle_topic(node_id: str) -> str:
    """Topic by which a node is notified that some of its sessions have to change."""
    return f"settle.{node_id}"


def instance_lease(session_id: str) -> str:
    """Its owner alone makes and removes instances and workspaces of the session."""
    return f"instance:{session_id}"


def workspace_lease(workspace: str) -> str:
    """Its owner makes the workspace for a session that is not recorded yet."""
    return f"workspace:{workspace}"


def not_running(session: Session, advice: str = "Start it first.") -> SessionNotRunning:
    return SessionNotRunning(
        f"Session {session.id} is {session.status}. {advice}", status_now=session.status.value
    )


class SessionRecords:
    def __init__(self, replica: Replica, observers: SessionObservers) -> None:
        self._replica = replica
        self._store = replica.store.sessions
        self._observers = observers

    async def get(self, session_id: str) -> Session:
        session = await self._store.get(session_id)
        if session is None:
            raise NotFound(f"No session has the id {session_id}.", code="session_not_found")
        return session

    async def unended(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if session.status.ended:
            raise SessionEnded(
                f"Session {session_id} has ended ({session.status}).",
                status_now=session.status.value,
            )
        return session

    async def usable(self, session_id: str) -> Session:
        """A session that has not ended, on a node that this replica reaches."""
        session = await self.unended(session_id)
        self.check_here(session)
        return session

    def is_here(self, session: Session) -> bool:
        return session.runtime_node == self._replica.node_id

    def check_here(self, session: Session) -> None:
        if not self.is_here(session):
            raise NodeUnreachable(
                f"Session {session.id} is on node {session.runtime_node}, which node "
                f"{self._replica.node_id} cannot reach. Ask a control plane there."
            )

    async def save(self, session: Session, *, event: str | None = None) -> Session:
        """
        Write the record, with an event named `event`, or after its status. May raise
        `VersionConflict`.
        """
        return await self._store.save(
            session, event=session_event(session, session.updated_at, event)
        )

    async def save_silently(self, session: Session) -> Session:
        """Write a change that the event feed does not report. May raise `VersionConflict`."""
        return await self._store.save(session)

    async def change(
        self,
        session_id: str,
        apply: Callable[[Session], Awaitable[Session]],
        *,
        event: str | None = None,
    ) -> Session:
        """
        Apply a change to the newest record, and repeat it whenever another writer was faster.
        Without `event`, no event is stored. A session that `apply` returns unchanged is not
        written.
        """
        while True:
            session = await self.usable(session_id)
            changed = await apply(session)
            if changed is session:
                return session
            try:
                if event is None:
                    return await self.save_silently(changed)
                return await self.save(changed, event=event)
            except VersionConflict:
                continue

    async def end(
        self, session: Session, status: SessionStatus, cause: Cause, message: str | None = None
    ) -> Session:
        """
        Record the end of a session. Observers do the rest: its executions end, its connection is
        closed, and `transitions` removes what it has on its node, after a last checkpoint.
        """
        now = self._replica.clock.now()
        session = await self.save(ended(session, status, cause, message, now))
        self._observers.session_ended(session)
        log.debug("session.ended", session_id=session.id, status=status, cause=cause)
        return session

    async def end_by_id(self, session_id: str, status: SessionStatus, cause: Cause) -> Session:
        """End a session in any state; an ended session is not changed."""
        while True:
            session = await self.get(session_id)
            if session.status.ended:
                return session
            try:
                return await self.end(session, status, cause)
            except VersionConflict:
                continue

    async def move(self, session: Session, node: Node) -> Session:
        """Record that the session is on another node from now on. May raise `VersionConflict`."""
        return await self.save(moved(session, node, self._replica.clock.now()), event="moved")

    async def wake(self, node_id: str) -> None:
        """Notify the replicas of a node that some of its sessions have to change."""
        try:
            await self._replica.coordination.notify(settle_topic(node_id))
        except TemporaryError as error:
            # The node's sweep finds them.
            log.info("node.not_notified", node_id=node_id, error=error.message)
