"""What is remembered of sessions and executions: bounded, told with its age, never by itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import Conflict, TemporaryError
from atoll.model.execution import Artifact, Attempt, Execution, ExecutionStatus, Request
from atoll.model.session import Cause, Session, SessionStatus
from atoll.settings import DatabaseSettings, RecallSettings, SqliteSettings
from atoll.stores import recall as module
from atoll.stores.recall import ARTIFACT, ATTEMPT, PIECE, ROUGHLY, RecallingStore, Recent
from atoll.stores.sql.store import SqlStore
from tests.clock import MovedClock
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


def recent(clock: MovedClock, **limits: int) -> Recent[Execution]:
    return Recent(clock, RecallSettings(ttl=TTL), **limits)


def known(memory: Recent[Any], *entities: Session | Execution) -> list[bool]:
    return [memory.recall(entity.id) is not None for entity in entities]


# The memory


def test_what_was_seen_is_recalled_with_its_age() -> None:
    clock = MovedClock()
    memory, execution = recent(clock), make_execution()
    assert memory.recall(execution.id) is None

    memory.see(execution)
    clock.time += 7.5

    found = memory.recall(execution.id)
    assert found is not None
    assert found.entity is execution
    assert found.age == 7.5


def test_what_is_seen_again_is_young_again() -> None:
    clock = MovedClock()
    memory, execution = recent(clock), make_execution()
    memory.see(execution)
    clock.time += 200
    memory.see(ended := replace(completed(execution), version=2))
    clock.time += 200

    found = memory.recall(execution.id)
    assert found is not None
    assert found.entity is ended
    assert found.age == 200


def test_an_older_version_that_comes_late_does_not_take_the_place_of_the_newer() -> None:
    clock = MovedClock()
    memory, execution = recent(clock), make_execution()
    memory.see(ended := replace(completed(execution), version=2))
    clock.time += 1
    memory.see(execution)

    found = memory.recall(execution.id)
    assert found is not None
    assert found.entity is ended
    assert found.age == 1


def test_what_is_too_old_is_forgotten() -> None:
    clock = MovedClock()
    memory, execution = recent(clock), make_execution()
    memory.see(execution)
    clock.time += TTL.total_seconds()
    assert known(memory, execution) == [True]

    clock.time += 0.001
    assert known(memory, execution) == [False]
    clock.time -= 1
    assert known(memory, execution) == [False]


def test_beyond_so_many_the_one_seen_longest_ago_is_forgotten() -> None:
    memory = recent(MovedClock(), items=3)
    a, b, c, d = (make_execution() for _ in range(4))
    for execution in (a, b, c):
        memory.see(execution)
    assert known(memory, a, b, c) == [True, True, True]

    memory.see(a)
    memory.see(d)
    assert known(memory, a, b, c, d) == [True, False, True, True]


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
        pytest.param(completed(make_execution(), log=((1, 1),) * (5000 // PIECE)), id="pieces"),
        pytest.param(make_execution(request=Request(body="x" * 5000)), id="body"),
        pytest.param(
            make_execution(
                attempts=(Attempt(NOW, NOW, "local", None, Cause.EVICTED),) * (5000 // ATTEMPT)
            ),
            id="attempts",
        ),
        pytest.param(
            completed(
                make_execution(),
                artifacts=(Artifact("a", 1, "text/plain", NOW, "0", "file"),) * (5000 // ARTIFACT),
            ),
            id="artifacts",
        ),
    ],
)
def test_beyond_so_many_bytes_the_one_seen_longest_ago_is_forgotten(large: Execution) -> None:
    memory = recent(MovedClock(), size=2 * ROUGHLY + 5000)
    small, other = make_execution(), make_execution()
    memory.see(small)
    memory.see(other)
    assert known(memory, small, other) == [True, True]

    memory.see(large)
    assert known(memory, small, other, large) == [False, False, True]

    # It gives its room back.
    memory.drop(large.id)
    memory.see(small)
    memory.see(other)
    assert known(memory, small, other, large) == [True, True, False]


def test_one_that_is_larger_than_the_memory_is_not_remembered() -> None:
    memory = recent(MovedClock(), size=10_000)
    small = make_execution()
    large = make_execution(request=Request(code="x" * 10_000))
    memory.see(small)
    memory.see(large)
    assert known(memory, large) == [False]


def test_the_environment_of_a_session_counts() -> None:
    memory: Recent[Session] = Recent(MovedClock(), RecallSettings(), size=ROUGHLY + 4999)
    session = make_session(env_vars={"a": "x" * 5000})
    memory.see(session)
    assert known(memory, session) == [False]


@pytest.mark.parametrize("off", [{"items": 0}, {"size": 0}], ids=["no items", "no bytes"])
def test_it_can_be_turned_off(off: dict[str, Any]) -> None:
    memory, execution = recent(MovedClock(), **off), make_execution()
    memory.see(execution)
    assert known(memory, execution) == [False]


# The store


@asynccontextmanager
async def opened(path: Path, clock: MovedClock) -> AsyncIterator[tuple[RecallingStore, SqlStore]]:
    """With a memory, and without: the same database as somebody else sees and writes it."""
    stores = [
        SqlStore(
            [f"sqlite:///{path / 'atoll.db'}"],
            sqlite=SqliteSettings(),
            database=DatabaseSettings(),
        )
        for _ in range(2)
    ]
    recalling = RecallingStore(stores[0], clock, RecallSettings(ttl=TTL))
    await recalling.open()
    await stores[1].open()
    try:
        yield recalling, stores[1]
    finally:
        await recalling.close()
        await stores[1].close()


async def unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(TemporaryError) as refused:
        await call
    assert refused.value.code == "database_unavailable"


async def test_reads_are_never_answered_from_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, MovedClock()) as (store, other):
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
        assert store.recent_sessions.recall(session.id) is not None


async def test_what_was_added_read_or_saved_last_is_remembered(tmp_path: Path) -> None:
    clock = MovedClock()
    async with opened(tmp_path, clock) as (store, other):
        added, read, saved = (make_session() for _ in range(3))
        await store.sessions.add(added)
        await other.sessions.add(read)
        assert await store.sessions.get(read.id) == read
        await store.sessions.add(saved)
        saved = await store.sessions.save(replace(saved, status=SessionStatus.TERMINATED))
        began, told, ended = (make_execution() for _ in range(3))
        await store.executions.add(began)
        await other.executions.add(told)
        assert await store.executions.get(told.id) == told
        await store.executions.add(ended)
        ended = await store.executions.save(completed(ended))
        await store.close()
        clock.time += 5

        for session in (added, read, saved):
            found = store.recent_sessions.recall(session.id)
            assert found is not None
            assert (found.entity, found.age) == (session, 5)
        for execution in (began, told, ended):
            remembered = store.recent_executions.recall(execution.id)
            assert remembered is not None
            assert (remembered.entity, remembered.age) == (execution, 5)
        assert ended.status is ExecutionStatus.COMPLETED


async def test_an_execution_that_was_superseded_is_remembered_so(tmp_path: Path) -> None:
    async with opened(tmp_path, MovedClock()) as (store, other):
        first = invoked()
        await store.executions.add(first)
        failed = await store.executions.save(ended(first))
        second = following(failed)
        await store.executions.add_after(second, failed)

        page = await store.executions.page(invocation_id=first.invocation_id)
        assert page == await other.executions.page(invocation_id=first.invocation_id)
        assert (await store.executions.latest()).items == (second,)
        for execution in page.items:
            remembered = store.recent_executions.recall(execution.id)
            assert remembered is not None
            assert remembered.entity == execution


async def test_what_could_not_be_written_or_found_is_not_remembered(tmp_path: Path) -> None:
    async with opened(tmp_path, MovedClock()) as (store, other):
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
        assert store.recent_sessions.recall(session.id) is None
        assert store.recent_executions.recall(execution.id) is None


async def _refused(call: Awaitable[object]) -> None:
    with pytest.raises(Conflict):
        await call


CALLS: list[tuple[str, Callable[[RecallingStore], Awaitable[object]]]] = [
    ("ping", lambda store: store.ping()),
    ("session", lambda store: store.sessions.get("sess_x")),
    ("new session", lambda store: store.sessions.add(make_session())),
    ("sessions", lambda store: store.sessions.page()),
    ("unsettled", lambda store: store.sessions.unsettled(NOW, node_id="local", limit=1)),
    ("timed out", lambda store: store.sessions.timed_out(NOW, node_id="local", limit=1)),
    ("seen", lambda store: store.sessions.seen(make_session(), NOW)),
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
async def test_every_call_notes_whether_the_database_is_there(
    tmp_path: Path, call: Callable[[RecallingStore], Awaitable[object]]
) -> None:
    async with opened(tmp_path, MovedClock()) as (store, _):
        assert not store.away
        await store.close()
        assert not store.away

        await unavailable(call(store))
        assert store.away

        await store.open()
        assert store.away
        await call(store)
        assert not store.away


async def test_a_database_that_refuses_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path, MovedClock()) as (store, _):
        session = make_session()
        await store.sessions.add(session)
        await store.close()
        await unavailable(store.ping())
        await store.open()
        with pytest.raises(Conflict):
            await store.sessions.add(session)
        assert not store.away


async def test_what_is_remembered_is_not_kept_back_by_a_database_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    silence = asyncio.Event()
    async with opened(tmp_path, MovedClock()) as (store, _):
        session = make_session()
        await store.sessions.add(session)

        async def read(session_id: str) -> None:
            async with store.patience(store.recent_sessions.recall(session_id)):
                await silence.wait()

        async with asyncio.timeout(30):
            await unavailable(read(session.id))
        # There is nothing else to show, so it takes the time that it takes.
        unknown = asyncio.create_task(read("sess_x"))
        await asyncio.wait([unknown], timeout=0.1)
        assert not unknown.done()
        silence.set()
        await unknown
