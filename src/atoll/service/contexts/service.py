"""
A session's contexts: processes that keep their state between executions.

The executor is the truth about them and nothing is stored: a context goes with the instance that it
is in, and is then not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.errors import Conflict, InvalidRequest, NotFound
from atoll.link.errors import ContextNotFound, StaleSession
from atoll.model.execution import Language
from atoll.model.session import SessionStatus
from atoll.model.workspace_path import working_directory

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.execution import Request
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.provisioning import Provisioning

MAX_CONTEXTS = 16
"""Contexts of one session."""


@dataclass(frozen=True, slots=True)
class Context:
    id: str
    session_id: str
    language: str
    cwd: str
    state: str
    """idle, busy or dead."""
    created_at: datetime
    execution_count: int


STILL = (SessionStatus.PAUSING, SessionStatus.PAUSED)
"""Statuses in which the contexts are there and cannot answer."""


class Contexts:
    def __init__(
        self,
        sessions: SessionAccess,
        driver: Driver,
        provisioning: Provisioning,
    ) -> None:
        self._sessions = sessions
        self._driver = driver
        self._provisioning = provisioning

    async def create(
        self, session_id: str, *, language: str, cwd: str | None, context_id: str | None = None
    ) -> Context:
        """A new one, ready to run something; with the id of one that exists, that one."""
        if language != Language.PYTHON:
            raise InvalidRequest(
                f"language: {language} has no contexts; python has.", code="language_unsupported"
            )
        connection = await self._sessions.starter.connect(session_id)
        limits, watch = self._driver.limits.executor_limits(
            connection.instance.handle, connection.session.resources
        )
        context_id = context_id or ids.context_id()
        while True:
            await self._provisioning.prepare_variables(connection.session)
            try:
                answer = await _call(
                    connection,
                    "context_create",
                    id=context_id,
                    language=language,
                    cwd=working_directory(cwd),
                    env=self._provisioning.variables(connection.session),
                    limits=limits,
                    watch=watch,
                    most=MAX_CONTEXTS,
                    edition=connection.session.version,
                )
                break
            except StaleSession:
                # The session has been changed since this replica read it.
                await self._sessions.connections.refresh(connection)
        return _context(session_id, answer["context"])

    async def list(self, session_id: str) -> tuple[Context, ...]:
        connection = await self._sessions.connections.reach(session_id)
        if connection is None and (await self._sessions.records.get(session_id)).status in STILL:
            connection = await self._sessions.starter.connect(session_id)
        if connection is None:
            return ()  # They went with the instance, which reading does not bring back.
        answer = await _call(connection, "context_list")
        return tuple(_context(session_id, item) for item in answer["contexts"])

    async def get(self, session_id: str, context_id: str) -> Context:
        for context in await self.list(session_id):
            if context.id == context_id:
                return context
        raise _not_found(session_id, context_id)

    async def restart(self, session_id: str, context_id: str) -> Context:
        """Begin anew, without state; what runs in it is cancelled."""
        return await self._about(session_id, "context_restart", context_id)

    async def interrupt(self, session_id: str, context_id: str) -> Context:
        """KeyboardInterrupt in what runs in it now, if anything does; its state stays."""
        return await self._about(session_id, "context_interrupt", context_id)

    async def delete(self, session_id: str, context_id: str) -> None:
        """What runs in it is cancelled."""
        connection = await self._sessions.starter.connect(session_id)
        await _call(connection, "context_delete", id=context_id)

    async def check(self, session_id: str, request: Request) -> None:
        """Whether a request that names a context can run in it, as far as that is known now."""
        if request.context_id is None:
            return
        if request.language is not Language.PYTHON:
            raise InvalidRequest(
                "language: contexts run python alone.", code="language_unsupported"
            )
        for name in ("args", "cwd", "function_name", "body", "terminal"):
            if getattr(request, name):
                raise InvalidRequest(f"{name}: not with context_id.", field=name)
        context = await self.get(session_id, request.context_id)
        if context.state == "dead":
            raise Conflict(
                f"Context {context.id} has ended; restart it.",
                code="context_dead",
                status_now=context.state,
            )
        connection = await self._sessions.starter.connect(session_id)
        if context.state == "busy" and connection.session.capacity > 1:
            # With a capacity of one its turn comes when the context is free.
            raise Conflict(f"Context {context.id} runs something.", code="context_busy")

    async def _about(self, session_id: str, operation: str, context_id: str) -> Context:
        connection = await self._sessions.starter.connect(session_id)
        answer = await _call(connection, operation, id=context_id)
        return _context(session_id, answer["context"])


async def _call(connection: Connection, operation: str, **fields: Any) -> dict[str, Any]:
    try:
        return await connection.link.call(operation, **fields)
    except ContextNotFound:
        raise _not_found(connection.session.id, fields["id"]) from None


def _not_found(session_id: str, context_id: str) -> NotFound:
    return NotFound(
        f"Session {session_id} has no context {context_id}; contexts go with the instance.",
        code="context_not_found",
    )


def _context(session_id: str, item: dict[str, Any]) -> Context:
    return Context(
        id=item["id"],
        session_id=session_id,
        language=item["language"],
        cwd=item["cwd"],
        state=item["state"],
        created_at=datetime.fromtimestamp(item["created"], UTC),
        execution_count=item["execution_count"],
    )
