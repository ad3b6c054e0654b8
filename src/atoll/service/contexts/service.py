"""
The verbs of the API for contexts: interpreters of a session that keep their state.

The executor knows a session's contexts, and nothing is stored: a context is lost with its instance.
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


PAUSED = (SessionStatus.PAUSING, SessionStatus.PAUSED)
"""Statuses in which the contexts exist, and the instance has to be resumed to list them."""


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
        """A new context, ready to run code; the existing one if `context_id` is known."""
        if language != Language.PYTHON:
            raise InvalidRequest(
                f"language: contexts run python only, not {language}.",
                code="language_unsupported",
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
                # The session was changed since this replica read it.
                await self._sessions.connections.refresh(connection)
        return _context(session_id, answer["context"])

    async def list(self, session_id: str) -> tuple[Context, ...]:
        connection = await self._sessions.connections.reach(session_id)
        if connection is None and (await self._sessions.records.get(session_id)).status in PAUSED:
            connection = await self._sessions.starter.connect(session_id)
        if connection is None:
            return ()  # They were lost with the instance; reading starts no other.
        answer = await _call(connection, "context_list")
        return tuple(_context(session_id, item) for item in answer["contexts"])

    async def get(self, session_id: str, context_id: str) -> Context:
        for context in await self.list(session_id):
            if context.id == context_id:
                return context
        raise _not_found(session_id, context_id)

    async def restart(self, session_id: str, context_id: str) -> Context:
        """Restart without state; what runs in it is cancelled."""
        return await self._change(session_id, "context_restart", context_id)

    async def interrupt(self, session_id: str, context_id: str) -> Context:
        """Raise KeyboardInterrupt in what runs in it now, if anything; its state stays."""
        return await self._change(session_id, "context_interrupt", context_id)

    async def delete(self, session_id: str, context_id: str) -> None:
        """Delete a context; what runs in it is cancelled."""
        connection = await self._sessions.starter.connect(session_id)
        await _call(connection, "context_delete", id=context_id)

    async def check(self, session_id: str, request: Request) -> None:
        """Refuse a request that cannot run in the context that it names."""
        if request.context_id is None:
            return
        if request.language is not Language.PYTHON:
            raise InvalidRequest("language: contexts run python only.", code="language_unsupported")
        for name in ("args", "cwd", "function_name", "body", "terminal"):
            if getattr(request, name):
                raise InvalidRequest(f"{name}: not allowed with context_id.", field=name)
        context = await self.get(session_id, request.context_id)
        if context.state == "dead":
            raise Conflict(
                f"Context {context.id} has ended. Restart it.",
                code="context_dead",
                status_now=context.state,
            )
        connection = await self._sessions.starter.connect(session_id)
        if context.state == "busy" and connection.session.capacity > 1:
            # With a capacity of one, the execution waits until the context is free.
            raise Conflict(f"Context {context.id} is running an execution.", code="context_busy")

    async def _change(self, session_id: str, operation: str, context_id: str) -> Context:
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
        f"Session {session_id} has no context {context_id}. Contexts are lost with their instance.",
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
