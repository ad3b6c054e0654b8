"""
A store that caches the sessions and executions that it read and wrote last.

Reads always go to the database. While the database is unavailable, callers that accept a stale
answer use `cached_sessions` and `cached_executions`. The caches are bounded in number, bytes and
age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from atoll.errors import Conflict, DatabaseUnavailable, TemporaryError
from atoll.model.execution import Execution
from atoll.model.session import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.model.event import Event
    from atoll.settings import RecallSettings
    from atoll.stores.base import Executions, Sessions, Store

T = TypeVar("T")
E = TypeVar("E", Session, Execution)

READ_TIMEOUT = 2.0
"""Seconds that a read may take when a cached entity can be shown instead."""
BASE_SIZE = 2000
"""Bytes that an entity is counted with, besides its text and output."""
ARTIFACT_SIZE = ATTEMPT_SIZE = 500
LOG_PIECE_SIZE = 100

MAX_ITEMS = 10_000
"""Entities in each cache."""
MAX_SIZE = 64 * 1024 * 1024
"""Bytes of each cache."""


@dataclass(frozen=True, slots=True)
class CachedEntity(Generic[E]):
    entity: E
    age: float
    """Seconds since it was read or written."""


class StaleCache(Generic[E]):
    """The entities that were read or written last; the least recent ones are evicted."""

    def __init__(
        self,
        clock: Clock,
        settings: RecallSettings,
        *,
        max_items: int = MAX_ITEMS,
        max_size: int = MAX_SIZE,
    ) -> None:
        self._clock = clock
        self._ttl = settings.ttl.total_seconds()
        self._max_items, self._max_size = max_items, max_size
        self._entries: OrderedDict[str, tuple[E, float, int]] = OrderedDict()
        self._size = 0

    def put(self, entity: E) -> None:
        known = self._entries.get(entity.id)
        if known is not None and known[0].version > entity.version:
            return  # A read that began before the newer version was written.
        self.drop(entity.id)
        size = _size(entity)
        self._entries[entity.id] = (entity, self._clock.monotonic(), size)
        self._size += size
        while len(self._entries) > self._max_items or self._size > self._max_size:
            self.drop(next(iter(self._entries)))

    def drop(self, entity_id: str) -> None:
        found = self._entries.pop(entity_id, None)
        if found is not None:
            self._size -= found[2]

    def get(self, entity_id: str) -> CachedEntity[E] | None:
        found = self._entries.get(entity_id)
        if found is None:
            return None
        entity, since, _ = found
        age = self._clock.monotonic() - since
        if age > self._ttl:
            self.drop(entity_id)
            return None
        return CachedEntity(entity, age)


def _size(entity: Session | Execution) -> int:
    """Approximate bytes. Cheap, because it is computed at every write."""
    if isinstance(entity, Session):
        return BASE_SIZE + _texts(entity.env_vars)
    request, outcome = entity.request, entity.outcome
    size = BASE_SIZE + len(request.code or "") + len(request.stdin or "") + len(request.body or "")
    size += ATTEMPT_SIZE * len(entity.attempts)
    for more in (request.event, request.command, request.args, request.env, request.metadata):
        if more:
            size += _texts(more)
    if outcome is not None:
        size += len(outcome.stdout) + len(outcome.stderr) + len(outcome.return_json or b"")
        size += len(outcome.results_json or b"")
        size += ARTIFACT_SIZE * len(outcome.artifacts) + LOG_PIECE_SIZE * len(outcome.log or ())
    return size


def _texts(value: Any) -> int:
    """Characters in a structure that was parsed from JSON, whose depth is bounded."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_texts(key) + _texts(item) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return sum(map(_texts, value))
    return 8


class StoreObserver(Protocol):
    def event_stored(self) -> None:
        """Called after an event was committed together with a session or an execution."""


class CachingStore:
    def __init__(self, store: Store, clock: Clock, settings: RecallSettings) -> None:
        self._store = store
        self._observers: list[StoreObserver] = []
        self.unavailable = False
        """Whether the last call failed because the database could not be reached."""
        self.cached_sessions: StaleCache[Session] = StaleCache(clock, settings)
        self.cached_executions: StaleCache[Execution] = StaleCache(clock, settings)
        self.sessions = cast(
            "Sessions", _CachingSessions(self, store.sessions, self.cached_sessions)
        )
        self.executions = cast(
            "Executions", _CachingExecutions(self, store.executions, self.cached_executions)
        )
        self.instances = store.instances
        self.templates = store.templates
        self.api_keys = store.api_keys
        self.idempotency_records = store.idempotency_records
        self.checkpoints = store.checkpoints
        self.volumes = store.volumes
        self.nodes = store.nodes
        self.events = store.events
        self.webhooks = store.webhooks

    def subscribe(self, observer: StoreObserver) -> None:
        self._observers.append(observer)

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def cluster(self) -> str:
        return await self._store.cluster()

    async def secret(self) -> str:
        return await self._store.secret()

    async def ping(self) -> None:
        await self.watch(self._store.ping())

    @asynccontextmanager
    async def bounded_read(self, cached: CachedEntity[Any] | None) -> AsyncIterator[None]:
        """Limits a read to `READ_TIMEOUT` if there is a cached entity to show instead."""
        try:
            async with asyncio.timeout(None if cached is None else READ_TIMEOUT):
                yield
        except TimeoutError as error:
            raise DatabaseUnavailable("The database does not answer in time.") from error

    async def watch(self, call: Awaitable[T]) -> T:
        """Await a call to the database and note whether the database is available."""
        try:
            answer = await call
        except TemporaryError as error:
            self.unavailable = self.unavailable or isinstance(error, DatabaseUnavailable)
            raise
        except Conflict:
            self.unavailable = False  # It answered.
            raise
        self.unavailable = False
        return answer

    def notify(self, event: Event | None) -> None:
        if event is not None:
            for observer in self._observers:
                observer.event_stored()


class _Caching(Generic[E]):
    """A noun of the store. Methods that are not defined here pass through."""

    def __init__(
        self, store: CachingStore, inner: Sessions | Executions, cache: StaleCache[E]
    ) -> None:
        self._store = store
        self._watch = store.watch
        self._inner: Any = inner
        self._cache: StaleCache[E] = cache

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._inner, name)

        async def watched(*args: Any, **named: Any) -> Any:
            return await self._watch(method(*args, **named))

        return watched

    async def add(self, entity: E, *, event: Event | None = None) -> None:
        await self._watch(self._inner.add(entity, event=event))
        self._cache.put(entity)
        self._store.notify(event)

    async def get(self, entity_id: str) -> E | None:
        entity: E | None = await self._watch(self._inner.get(entity_id))
        if entity is not None:
            self._cache.put(entity)
        return entity

    async def save(self, entity: E, *, event: Event | None = None) -> E:
        saved: E = await self._watch(self._inner.save(entity, event=event))
        self._cache.put(saved)
        self._store.notify(event)
        return saved


class _CachingSessions(_Caching[Session]):
    async def touch(self, session: Session, at: datetime) -> bool:
        written: bool = await self._watch(self._inner.touch(session, at))
        if written:
            self._cache.put(replace(session, active_at=at))
        return written

    async def explain(self, session: Session, message: str) -> bool:
        written: bool = await self._watch(self._inner.explain(session, message))
        if written:
            self._cache.put(replace(session, message=message))
        return written


class _CachingExecutions(_Caching[Execution]):
    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        await self._watch(self._inner.add_after(execution, previous, event=event))
        self._cache.put(replace(previous, superseded=True, version=previous.version + 1))
        self._cache.put(execution)
        self._store.notify(event)
