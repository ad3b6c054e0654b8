"""The cache of sessions and executions: bounded, with ages, used only on request."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import Conflict, TemporaryError
from atoll.model.event import Event
from atoll.model.execution import Artifact, Attempt, Execution, ExecutionStatus, Request
from atoll.model.session import Cause, Session, SessionStatus
from atoll.settings import DatabaseSettings, RecallSettings, SqliteSettings
from atoll.stores import stale_cache as module
from atoll.stores.sql.store import SqlStore
from atoll.stores.stale_cache import (
    ARTIFACT_SIZE,
    ATTEMPT_SIZE,
    BASE_SIZE,
    LOG_PIECE_SIZE,
    CachingStore,
    StaleCache,
)
from atoll.testing import ManualClock
from tests.contract.stores.store_entities import (
    NOW,
    completed,
    ended,
    following,
    invoked,
    make_execution,
    make_session,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio

TTL = timedelta(seconds=300)


def cache_of(clock: ManualClock, **limits: int) -> StaleCache[Execution]:
    return StaleCache(clock, RecallSettings(ttl=TTL), **limits)


def are_cached(cache: StaleCache[Any], *entities: Session | Execution) -> list[bool]:
    return [cache.get(entity.id) is not None for entity in entities]


# The cache


def test_an_entity_is_returned_with_its_age() -> None:
    clock = ManualClock()
    cache, execution = cache_of(clock), make_execution()
    assert cache.get(execution.id) is None

    cache.put(execution)
    clock.time += 7.5

    found = cache.get(execution.id)
    assert found is not None
    assert found.entity is execution
    assert found.age == 7.5


def test_putting_an_entity_again_resets_its_age() -> None:
    clock = ManualClock()
    cache, execution = cache_of(clock), make_execution()
    cache.put(execution)
    clock.time += 200
    cache.put(ended := replace(completed(execution), version=2))
    clock.time += 200

    found = cache.get(execution.id)
    assert found is not None
    assert found.entity is ended
    assert found.age == 200


def test_a_late_older_version_does_not_replace_a_newer_one() -> None:
    clock = ManualClock()
    cache, execution = cache_of(clock), make_execution()
    cache.put(ended := replace(completed(execution), version=2))
    clock.time += 1
    cache.put(execution)

    found = cache.get(execution.id)
    assert found is not None
    assert found.entity is ended
    assert found.age == 1


def test_entities_expire() -> None:
    clock = ManualClock()
    cache, execution = cache_of(clock), make_execution()
    cache.put(execution)
    clock.time += TTL.total_seconds()
    assert are_cached(cache, execution) == [True]

    clock.time += 0.001
    assert are_cached(cache, execution) == [False]
    clock.time -= 1
    assert are_cached(cache, execution) == [False]


def test_the_least_recent_entity_is_evicted_from_a_full_cache() -> None:
    cache = cache_of(ManualClock(), max_items=3)
    a, b, c, d = (make_execution() for _ in range(4))
    for execution in (a, b, c):
        cache.put(execution)
    assert are_cached(cache, a, b, c) == [True, True, True]

    cache.put(a)
    cache.put(d)
    assert are_cached(cache, a, b, c, d) == [True, False, True, True]


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(make_execution(request=Request(code="x" * 5000)), id="code"),
        pytest.param(make_execution(request=Request(stdin="x" * 5000)), id="stdin"),
        pytest.param(make_execution(request=Request(command=("x" * 2500,) * 2)), id="command"),
        pytest.param(make_execution(request=Request(args=("x" * 5000,))), id="arguments"),
        pytest.param(make_execution(request=Request(env={"a": "x" * 5000})), id="environment"),
        pytest.param(make_execution(request=Request(env={"x" * 5000: "a"})), id="names"),
        pytest.param(make_execution(request=Request(event={"a": ["x" * 5000]})), id="event"),
        pytest.param(make_execution(request=Request(event=[1] * 625)), id="numbers"),
        pytest.param(completed(make_execution(), stdout=b"x" * 5000), id="stdout"),
        pytest.param(completed(make_execution(), stderr=b"x" * 5000), id="stderr"),
        pytest.param(completed(make_execution(), return_json=b"x" * 5000), id="value"),
        pytest.param(completed(make_execution(), results_json=b"x" * 5000), id="results"),
        pytest.param(
            completed(make_execution(), log=((1, 1),) * (5000 // LOG_PIECE_SIZE)), id="pieces"
        ),
        pytest.param(make_execution(request=Request(body="x" * 5000)), id="body"),
        pytest.param(
            make_execution(
                attempts=(Attempt(NOW, NOW, "local", None, Cause.EVICTED),) * (5000 // ATTEMPT_SIZE)
            ),
            id="attempts",
        ),
        pytest.param(
            completed(
                make_execution(),
                artifacts=(Artifact("a", 1, "text/plain", NOW, "0", "file"),)
                * (5000 // ARTIFACT_SIZE),
            ),
            id="artifacts",
        ),
    ],
)
def test_the_least_recent_entities_are_evicted_from_a_cache_of_limited_size(
    large: Execution,
) -> None:
    cache = cache_of(ManualClock(), max_size=2 * BASE_SIZE + 5000)
    small, other = make_execution(), make_execution()
    cache.put(small)
    cache.put(other)
    assert are_cached(cache, small, other) == [True, True]

    cache.put(large)
    assert are_cached(cache, small, other, large) == [False, False, True]

    # Dropping it frees its space.
    cache.drop(large.id)
    cache.put(small)
    cache.put(other)
    assert are_cached(cache, small, other, large) == [True, True, False]


def test_an_entity_larger_than_the_cache_is_not_cached() -> None:
    cache = cache_of(ManualClock(), max_size=10_000)
    small = make_execution()
    large = make_execution(request=Request(code="x" * 10_000))
    cache.put(small)
    cache.put(large)
    assert are_cached(cache, large) == [False]


def test_the_environment_of_a_session_counts_towards_its_size() -> None:
    cache: StaleCache[Session] = StaleCache(
        ManualClock(), RecallSettings(), max_size=BASE_SIZE + 4999
    )
    session = make_session(env_vars={"a": "x" * 5000})
    cache.put(session)
    assert are_cached(cache, session) == [False]


@pytest.mark.parametrize("off", [{"max_items": 0}, {"max_size": 0}], ids=["no items", "no bytes"])
def test_a_cache_of_size_zero_stores_nothing(off: dict[str, Any]) -> None:
    cache, execution = cache_of(ManualClock(), **off), make_execution()
    cache.put(execution)
    assert are_cached(cache, execution) == [False]


# The store


@asynccontextmanager
async def opened(path: Path, clock: ManualClock) -> AsyncIterator[tuple[CachingStore, SqlStore]]:
    """A caching store, and a plain store on the same database."""
    stores = [
        SqlStore(
            [f"sqlite:///{path / 'atoll.db'}"],
            sqlite=SqliteSettings(),
            database=DatabaseSettings(),
        )
        for _ in range(2)
    ]
    caching = CachingStore(stores[0], clock, RecallSettings(ttl=TTL))
    await caching.open()
    await stores[1].open()
    try:
        yield caching, stores[1]
    finally:
        await caching.close()
        await stores[1].close()


async def unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(TemporaryError) as refused:
        await call
    assert refused.value.code == "database_unavailable"


async def test_reads_never_return_cached_entities(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as (store, other):
        session, execution = make_session(), make_execution()
        await store.sessions.add(session)
        await store.executions.add(execution)
        changed = await other.sessions.save(replace(session, status=SessionStatus.TERMINATED))
        ended = await other.executions.save(completed(execution))
        assert await store.sessions.get(session.id) == changed
        assert await store.executions.get(execution.id) == ended

        await store.close()
        await unavailable(store.sessions.get(session.id))
        await unavailable(store.executions.get(execution.id))
        assert store.cached_sessions.get(session.id) is not None


async def test_added_read_and_saved_entities_are_cached(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as (store, other):
        added, read, saved = (make_session() for _ in range(3))
        await store.sessions.add(added)
        await other.sessions.add(read)
        assert await store.sessions.get(read.id) == read
        await store.sessions.add(saved)
        saved = await store.sessions.save(replace(saved, status=SessionStatus.TERMINATED))
        began, read_one, ended = (make_execution() for _ in range(3))
        await store.executions.add(began)
        await other.executions.add(read_one)
        assert await store.executions.get(read_one.id) == read_one
        await store.executions.add(ended)
        ended = await store.executions.save(completed(ended))
        await store.close()
        clock.time += 5

        for session in (added, read, saved):
            found = store.cached_sessions.get(session.id)
            assert found is not None
            assert (found.entity, found.age) == (session, 5)
        for execution in (began, read_one, ended):
            cached = store.cached_executions.get(execution.id)
            assert cached is not None
            assert (cached.entity, cached.age) == (execution, 5)
        assert ended.status is ExecutionStatus.COMPLETED


async def test_a_superseded_execution_is_cached_as_superseded(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as (store, other):
        first = invoked()
        await store.executions.add(first)
        failed = await store.executions.save(ended(first))
        second = following(failed)
        await store.executions.add_after(second, failed)

        page = await store.executions.page(invocation_id=first.invocation_id)
        assert page == await other.executions.page(invocation_id=first.invocation_id)
        assert (await store.executions.latest()).items == (second,)
        for execution in page.items:
            cached = store.cached_executions.get(execution.id)
            assert cached is not None
            assert cached.entity == execution


async def test_failed_writes_and_missing_entities_are_not_cached(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as (store, other):
        session = make_session()
        assert await store.sessions.get(session.id) is None
        await other.sessions.add(session)
        with pytest.raises(Conflict):
            await store.sessions.add(session)
        with pytest.raises(Conflict):
            await store.sessions.save(replace(session, version=7))
        await store.close()
        execution = make_execution()
        await unavailable(store.executions.add(execution))
        assert store.cached_sessions.get(session.id) is None
        assert store.cached_executions.get(execution.id) is None


class Counter:
    stored = 0

    def event_stored(self) -> None:
        self.stored += 1


async def test_observers_are_notified_once_an_event_is_committed(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as (store, _):
        observer = Counter()
        store.subscribe(observer)
        session, event = make_session(), Event("session.created", "sess_1", NOW)

        await store.sessions.add(session)
        assert observer.stored == 0
        await store.sessions.save(session, event=event)
        assert observer.stored == 1
        with pytest.raises(Conflict):
            await store.sessions.save(session, event=event)
        assert observer.stored == 1


async def _refused(call: Awaitable[object]) -> None:
    with pytest.raises(Conflict):
        await call


CALLS: list[tuple[str, Callable[[CachingStore], Awaitable[object]]]] = [
    ("ping", lambda store: store.ping()),
    ("session", lambda store: store.sessions.get("sess_x")),
    ("new session", lambda store: store.sessions.add(make_session())),
    ("sessions", lambda store: store.sessions.page()),
    ("unsettled", lambda store: store.sessions.unsettled(NOW, node_id="local", limit=1)),
    ("timed out", lambda store: store.sessions.timed_out(NOW, node_id="local", limit=1)),
    ("seen", lambda store: store.sessions.touch(make_session(), NOW)),
    ("unfinished sessions", lambda store: store.sessions.unfinished(limit=1)),
    ("holdings", lambda store: store.sessions.holdings("local", limit=1)),
    ("count", lambda store: store.sessions.count(SessionStatus.RUNNING)),
    ("execution", lambda store: store.executions.get("exec_x")),
    ("new execution", lambda store: store.executions.add(make_execution())),
    ("next execution", lambda store: _refused(store.executions.add_after(invoked(), invoked()))),
    ("executions", lambda store: store.executions.page(invocation_id="inv_x")),
    ("unfinished executions", lambda store: store.executions.unfinished(limit=1)),
    ("holders", lambda store: store.executions.holders()),
    ("latest executions", lambda store: store.executions.latest()),
]


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
async def test_every_call_updates_whether_the_database_is_available(
    tmp_path: Path, call: Callable[[CachingStore], Awaitable[object]]
) -> None:
    async with opened(tmp_path, ManualClock()) as (store, _):
        assert not store.unavailable
        await store.close()
        assert not store.unavailable

        await unavailable(call(store))
        assert store.unavailable

        await store.open()
        assert store.unavailable
        await call(store)
        assert not store.unavailable


async def test_a_database_that_reports_a_conflict_is_available(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as (store, _):
        session = make_session()
        await store.sessions.add(session)
        await store.close()
        await unavailable(store.ping())
        await store.open()
        with pytest.raises(Conflict):
            await store.sessions.add(session)
        assert not store.unavailable


async def test_a_read_that_hangs_times_out_when_a_cached_entity_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.01)
    silence = asyncio.Event()
    async with opened(tmp_path, ManualClock()) as (store, _):
        session = make_session()
        await store.sessions.add(session)

        async def read(session_id: str) -> None:
            async with store.bounded_read(store.cached_sessions.get(session_id)):
                await silence.wait()

        async with asyncio.timeout(30):
            await unavailable(read(session.id))
        # Nothing is cached, so the read is not bounded.
        unknown = asyncio.create_task(read("sess_x"))
        await asyncio.wait([unknown], timeout=0.1)
        assert not unknown.done()
        silence.set()
        await unknown
