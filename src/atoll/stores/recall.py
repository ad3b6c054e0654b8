"""
A store that remembers what was last read and written of sessions and executions.

It answers nothing from memory by itself: what it remembers may be old. While the database is away,
`recall` gives it to those who would rather have that than nothing, with its age. Bounded in number,
bytes and age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from atoll.errors import Conflict, DatabaseUnavailable, TemporaryError
from atoll.model.execution import Execution
from atoll.model.session import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.model.event import Event
    from atoll.model.execution import ExecutionStatus
    from atoll.model.page import Page
    from atoll.model.session import Holding, SessionStatus
    from atoll.settings import RecallSettings
    from atoll.stores.base import Executions, Sessions, Store

T = TypeVar("T")
E = TypeVar("E", Session, Execution)

PATIENCE = 2.0
"""Seconds that a read may take when there is something in memory to show instead."""
ROUGHLY = 2000
"""Bytes of an entity besides its texts."""
ARTIFACT = ATTEMPT = 500
PIECE = 100

MAX_ITEMS = 10_000
"""Sessions, and executions, that are remembered."""
MAX_SIZE = 64 * 1024 * 1024
"""Bytes that the remembered sessions may take, and as many for executions."""


@dataclass(frozen=True, slots=True)
class Remembered(Generic[E]):
    entity: E
    age: float
    """Seconds since it was known to be so."""


class Recent(Generic[E]):
    """The entities that were seen last."""

    def __init__(
        self,
        clock: Clock,
        settings: RecallSettings,
        *,
        items: int = MAX_ITEMS,
        size: int = MAX_SIZE,
    ) -> None:
        self._clock = clock
        self._ttl = settings.ttl.total_seconds()
        self._items, self._bytes = items, size
        self._kept: OrderedDict[str, tuple[E, float, int]] = OrderedDict()
        self._size = 0

    def see(self, entity: E) -> None:
        known = self._kept.get(entity.id)
        if known is not None and known[0].version > entity.version:
            return  # Read before the other was written, and told of later.
        self.drop(entity.id)
        size = _size(entity)
        self._kept[entity.id] = (entity, self._clock.monotonic(), size)
        self._size += size
        while len(self._kept) > self._items or self._size > self._bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, entity_id: str) -> None:
        found = self._kept.pop(entity_id, None)
        if found is not None:
            self._size -= found[2]

    def recall(self, entity_id: str) -> Remembered[E] | None:
        found = self._kept.get(entity_id)
        if found is None:
            return None
        entity, seen, _ = found
        age = self._clock.monotonic() - seen
        if age > self._ttl:
            self.drop(entity_id)
            return None
        return Remembered(entity, age)


def _size(entity: Session | Execution) -> int:
    """Bytes, about. Cheap: it is asked at every write."""
    if isinstance(entity, Session):
        return ROUGHLY + _texts(entity.env_vars)
    request, outcome = entity.request, entity.outcome
    size = ROUGHLY + len(request.code or "") + len(request.stdin or "") + len(request.body or "")
    size += ATTEMPT * len(entity.attempts)
    for more in (request.event, request.command, request.args, request.env, request.metadata):
        if more:
            size += _texts(more)
    if outcome is not None:
        size += len(outcome.stdout) + len(outcome.stderr) + len(outcome.return_json or b"")
        size += len(outcome.results_json or b"")
        size += ARTIFACT * len(outcome.artifacts) + PIECE * len(outcome.log or ())
    return size


def _texts(value: Any) -> int:
    """Characters in a structure that came as JSON, which cannot be deep."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_texts(key) + _texts(item) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return sum(map(_texts, value))
    return 8


class RecallingStore:
    """Another store, with a memory."""

    def __init__(self, store: Store, clock: Clock, settings: RecallSettings) -> None:
        self._store = store
        self.away = False
        """Whether the last that was heard of the database is that it cannot be reached."""
        self.told: Callable[[], None] = _to_nobody
        """Called after an event was stored with a session or an execution."""
        self.recent_sessions: Recent[Session] = Recent(clock, settings)
        self.recent_executions: Recent[Execution] = Recent(clock, settings)
        self.sessions: Sessions = _Sessions(self, store.sessions, self.recent_sessions)
        self.executions: Executions = _Executions(self, store.executions, self.recent_executions)
        self.instances = store.instances
        self.templates = store.templates
        self.keys = store.keys
        self.requests = store.requests
        self.checkpoints = store.checkpoints
        self.volumes = store.volumes
        self.nodes = store.nodes
        self.events = store.events
        self.webhooks = store.webhooks

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def cluster(self) -> str:
        return await self._store.cluster()

    async def secret(self) -> str:
        return await self._store.secret()

    async def ping(self) -> None:
        await self.noting(self._store.ping())

    @asynccontextmanager
    async def patience(self, remembered: Remembered[Any] | None) -> AsyncIterator[None]:
        """For a read; not much when what is remembered will do."""
        try:
            async with asyncio.timeout(None if remembered is None else PATIENCE):
                yield
        except TimeoutError as error:
            raise DatabaseUnavailable("The database does not answer in time.") from error

    async def noting(self, call: Awaitable[T]) -> T:
        """Its answer; and from how it goes, whether the database is there."""
        try:
            answer = await call
        except TemporaryError as error:
            self.away = self.away or isinstance(error, DatabaseUnavailable)
            raise
        except Conflict:
            self.away = False  # It answered.
            raise
        self.away = False
        return answer


def _to_nobody() -> None:
    """Nobody follows what happens."""


class _Sessions:
    def __init__(self, store: RecallingStore, inner: Sessions, recent: Recent[Session]) -> None:
        self._store = store
        self._noting = store.noting
        self._inner = inner
        self._recent = recent

    async def add(self, session: Session, *, event: Event | None = None) -> None:
        await self._noting(self._inner.add(session, event=event))
        self._recent.see(session)
        if event is not None:
            self._store.told()

    async def get(self, session_id: str) -> Session | None:
        session = await self._noting(self._inner.get(session_id))
        if session is not None:
            self._recent.see(session)
        return session

    async def save(self, session: Session, *, event: Event | None = None) -> Session:
        saved = await self._noting(self._inner.save(session, event=event))
        self._recent.see(saved)
        if event is not None:
            self._store.told()
        return saved

    async def page(
        self,
        *,
        status: SessionStatus | None = None,
        template_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Session]:
        return await self._noting(
            self._inner.page(status=status, template_id=template_id, cursor=cursor, limit=limit)
        )

    async def unsettled(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        return await self._noting(self._inner.unsettled(now, node_id=node_id, limit=limit))

    async def timed_out(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        return await self._noting(self._inner.timed_out(now, node_id=node_id, limit=limit))

    async def seen(self, session: Session, at: datetime) -> bool:
        written = await self._noting(self._inner.seen(session, at))
        if written:
            self._recent.see(replace(session, active_at=at))
        return written

    async def unfinished(
        self, *, limit: int, after: str = "", node_id: str | None = None
    ) -> list[Session]:
        return await self._noting(self._inner.unfinished(limit=limit, after=after, node_id=node_id))

    async def holdings(self, node_id: str, *, limit: int, after: str = "") -> list[Holding]:
        return await self._noting(self._inner.holdings(node_id, limit=limit, after=after))

    async def count(self, status: SessionStatus, *, node_id: str | None = None) -> int:
        return await self._noting(self._inner.count(status, node_id=node_id))


class _Executions:
    def __init__(self, store: RecallingStore, inner: Executions, recent: Recent[Execution]) -> None:
        self._store = store
        self._noting = store.noting
        self._inner = inner
        self._recent = recent

    async def add(self, execution: Execution, *, event: Event | None = None) -> None:
        await self._noting(self._inner.add(execution, event=event))
        self._recent.see(execution)
        if event is not None:
            self._store.told()

    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        await self._noting(self._inner.add_after(execution, previous, event=event))
        self._recent.see(replace(previous, superseded=True, version=previous.version + 1))
        self._recent.see(execution)
        if event is not None:
            self._store.told()

    async def get(self, execution_id: str) -> Execution | None:
        execution = await self._noting(self._inner.get(execution_id))
        if execution is not None:
            self._recent.see(execution)
        return execution

    async def save(self, execution: Execution, *, event: Event | None = None) -> Execution:
        saved = await self._noting(self._inner.save(execution, event=event))
        self._recent.see(saved)
        if event is not None:
            self._store.told()
        return saved

    async def page(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        return await self._noting(
            self._inner.page(
                session_id=session_id,
                invocation_id=invocation_id,
                status=status,
                cursor=cursor,
                limit=limit,
            )
        )

    async def latest(
        self,
        *,
        session_id: str | None = None,
        statuses: Sequence[ExecutionStatus] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        return await self._noting(
            self._inner.latest(session_id=session_id, statuses=statuses, cursor=cursor, limit=limit)
        )

    async def unfinished(
        self, *, limit: int, after: str = "", holder: str | None = None
    ) -> list[Execution]:
        return await self._noting(self._inner.unfinished(limit=limit, after=after, holder=holder))

    async def holders(self) -> set[str | None]:
        return await self._noting(self._inner.holders())
