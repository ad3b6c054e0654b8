"""The verbs of the API for sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, TemporaryError
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.service.sessions.optional_parts import require_pausing
from atoll.service.sessions.records import not_running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from atoll.model.page import Page
    from atoll.service.sessions.clone import Cloner
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.create import NewSession, SessionCreator
    from atoll.service.sessions.lifecycle import Lifecycle
    from atoll.service.sessions.start import SessionStarter
    from atoll.service.sessions.transitions import Transitions
    from atoll.service.sessions.update import SessionChange, SessionUpdater


@dataclass(frozen=True)
class Verbs:
    """What carries out the larger verbs."""

    creator: SessionCreator
    cloner: Cloner
    updater: SessionUpdater
    lifecycle: Lifecycle
    starter: SessionStarter
    transitions: Transitions


class Sessions:
    def __init__(
        self,
        core: SessionCore,
        verbs: Verbs,
        *,
        max_wait: timedelta,
    ) -> None:
        self._replica = core.replica
        self._store = core.replica.store
        self._driver = core.driver
        self._records = core.records
        self._creator = verbs.creator
        self._cloner = verbs.cloner
        self._updater = verbs.updater
        self._lifecycle = verbs.lifecycle
        self._starter = verbs.starter
        self._transitions = verbs.transitions
        self._max_wait = max_wait.total_seconds()

    @property
    def created(self) -> dict[str, int]:
        """How many sessions this process has created, by how they started."""
        return {"pool": self._creator.warm_starts, "cold": self._starter.cold_starts}

    async def create(
        self, new: NewSession, *, session_id: str | None = None, wait: bool = True
    ) -> Session:
        """A running session; see `SessionCreator.create`."""
        return await self._creator.create(new, session_id=session_id, wait=wait)

    async def clone(
        self, source_id: str, change: SessionChange, *, session_id: str | None = None
    ) -> Session:
        """A running session with the files of another; see `Cloner.clone`."""
        return await self._cloner.clone(source_id, change, session_id=session_id)

    async def get(self, session_id: str) -> Session:
        return await self._records.get(session_id)

    async def get_or_recall(self, session_id: str) -> tuple[Session, float | None]:
        """
        The session; while the database does not answer, the last known state with its age in
        seconds. For display, not for decisions.
        """
        cache = self._store.cached_sessions
        try:
            async with self._store.bounded_read(cache.get(session_id)):
                return await self.get(session_id), None
        except TemporaryError:
            cached = cache.get(session_id)
            if cached is None:
                raise
            return cached.entity, cached.age

    async def list(
        self,
        *,
        status: SessionStatus | None,
        template_id: str | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Session]:
        return await self._store.sessions.page(
            status=status, template_id=template_id, cursor=cursor, limit=limit
        )

    async def update(self, session_id: str, change: SessionChange) -> Session:
        return await self._updater.update(session_id, change)

    async def start(self, session_id: str, *, wait: float) -> Session:
        """Make the session run, whatever its state."""
        return await self._reach(session_id, Wanted.RUNNING, None, wait)

    async def stop(self, session_id: str, *, wait: float) -> Session:
        """End the session's instance and keep its files; what runs in it is cancelled."""
        return await self._reach(session_id, Wanted.STOPPED, Cause.USER, wait)

    async def archive(self, session_id: str, *, wait: float) -> Session:
        """Stop the session, and keep its files in the blob store alone."""
        return await self._reach(session_id, Wanted.ARCHIVED, Cause.USER, wait)

    async def pause(self, session_id: str, *, wait: float) -> Session:
        """Freeze the session with its memory; refused while an execution is under way."""
        require_pausing(self._driver)
        session = await self._records.usable(session_id)
        if session.wanted not in (Wanted.RUNNING, Wanted.PAUSED) or session.rested_at is not None:
            raise not_running(session)
        if await self._lifecycle.is_busy(session_id):
            raise _busy(session_id)
        session = await self._reach(session_id, Wanted.PAUSED, None, wait)
        if session.wanted is not Wanted.PAUSED:
            raise _busy(session_id)
        return session

    async def _reach(
        self, session_id: str, wanted: Wanted, cause: Cause | None, wait: float
    ) -> Session:
        return await self._lifecycle.reach(
            session_id, wanted, cause, wait=min(wait, self._max_wait)
        )

    async def delete(self, session_id: str) -> Session:
        """End a session; one that has ended stays as it ended."""
        return await self._records.end_by_id(session_id, SessionStatus.TERMINATED, Cause.USER)

    async def processes(self, session_id: str, *, end: bool = False) -> Sequence[Any]:
        """Processes that executions left running; with `end`, they are killed."""
        connection = await self._starter.connect(session_id)
        answer = await connection.link.call("processes", kill=end)
        found: Sequence[Any] = answer["processes"]
        return found

    async def end_all(self) -> None:
        """End all sessions of this node, because its server ends for good."""
        node_id, after = self._replica.node_id, ""
        while unfinished := await self._store.sessions.unfinished(
            limit=100, after=after, node_id=node_id
        ):
            for session in unfinished:
                await self._records.end_by_id(session.id, SessionStatus.TERMINATED, Cause.SHUTDOWN)
            after = unfinished[-1].id
        after = ""
        while held := await self._store.sessions.holdings(node_id, limit=100, after=after):
            for holding in held:
                # It had ended before, and no other process will clear it.
                if not self._transitions.is_clearing(holding.session_id):
                    self._replica.background.start(
                        self._transitions.settle(holding.session_id),
                        f"clear {holding.session_id}",
                    )
            after = held[-1].session_id


def _busy(session_id: str) -> Conflict:
    return Conflict(
        f"An execution runs in session {session_id} or waits for it. Wait until it ends, or cancel "
        "it.",
        code="session_busy",
    )
