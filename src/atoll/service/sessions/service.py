"""The verbs of the API for sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, TemporaryError
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.service.sessions.pausing_and_resizing import require_pausing
from atoll.service.sessions.records import not_running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.model.page import Page
    from atoll.service.sessions.clone import Cloner
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.create import SessionCreator
    from atoll.service.sessions.new_session import NewSession
    from atoll.service.sessions.start import SessionStarter
    from atoll.service.sessions.update import SessionChange, SessionUpdater
    from atoll.service.sessions.wanted_state import WantedStates


class Sessions:
    def __init__(
        self,
        core: SessionCore,
        creator: SessionCreator,
        cloner: Cloner,
        updater: SessionUpdater,
        wanted_states: WantedStates,
        starter: SessionStarter,
    ) -> None:
        self._store = core.replica.store
        self._driver = core.driver
        self._records = core.records
        self._creator = creator
        self._cloner = cloner
        self._updater = updater
        self._wanted_states = wanted_states
        self._starter = starter

    @property
    def created(self) -> dict[str, int]:
        """How many sessions this process has created, by how they started."""
        return self._creator.created

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
        return await self._wanted_states.reach(session_id, Wanted.RUNNING, None, wait=wait)

    async def stop(self, session_id: str, *, wait: float) -> Session:
        """End the session's instance and keep its files; what runs in it is cancelled."""
        return await self._wanted_states.reach(session_id, Wanted.STOPPED, Cause.USER, wait=wait)

    async def archive(self, session_id: str, *, wait: float) -> Session:
        """Stop the session, and keep its files in the blob store alone."""
        return await self._wanted_states.reach(session_id, Wanted.ARCHIVED, Cause.USER, wait=wait)

    async def pause(self, session_id: str, *, wait: float) -> Session:
        """Freeze the session with its memory; refused while an execution is under way."""
        require_pausing(self._driver)
        session = await self._records.usable(session_id)
        if session.wanted not in (Wanted.RUNNING, Wanted.PAUSED) or session.rested_at is not None:
            raise not_running(session)
        if await self._wanted_states.is_busy(session_id):
            raise _busy(session_id)
        session = await self._wanted_states.reach(session_id, Wanted.PAUSED, None, wait=wait)
        if session.wanted is not Wanted.PAUSED:
            raise _busy(session_id)
        return session

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
        await self._wanted_states.end_all()


def _busy(session_id: str) -> Conflict:
    return Conflict(
        f"An execution runs in session {session_id} or waits for it. Wait until it ends, or cancel "
        "it.",
        code="session_busy",
    )
