"""Pages stay put while rows come and go; sweeps find what they have to."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll import ids
from atoll.errors import InvalidRequest
from atoll.model.execution import ExecutionStatus
from atoll.model.session import Holding, SessionStatus, Wanted

from . import store_entities as make
from .conftest import on_sqlite
from .store_entities import NOW, invoked, make_execution, make_session, make_template, walk

if TYPE_CHECKING:
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio

shared = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def newest_first(entities: list[Any]) -> list[Any]:
    return sorted(entities, key=lambda entity: (entity.created_at, entity.id), reverse=True)


async def test_an_empty_list_is_one_empty_page(store: Store) -> None:
    page = await store.executions.page()

    assert page.items == ()
    assert page.next_cursor is None


async def test_a_full_last_page_has_no_cursor(store: Store) -> None:
    for _ in range(4):
        await store.templates.add(make_template())

    first = await store.templates.page(limit=2)
    second = await store.templates.page(limit=2, cursor=first.next_cursor)

    assert len(second.items) == 2
    assert second.next_cursor is None


@shared
@given(
    moments=st.lists(st.integers(0, 3), max_size=12),
    limit=st.integers(1, 5),
)
async def test_pages_contain_every_session_once_newest_first(
    store: Store, moments: list[int], limit: int
) -> None:
    """Many share one microsecond: the order is still total."""
    template_id = ids.template_id()
    sessions = [
        make_session(template_id=template_id, created_at=NOW + timedelta(microseconds=moment))
        for moment in moments
    ]
    for session in sessions:
        await store.sessions.add(session)

    got = await walk(store.sessions.page, limit, template_id=template_id)

    assert got == newest_first(sessions)


@shared
@given(
    present=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=12),
    limit=st.integers(1, 4),
)
async def test_pages_neither_repeat_nor_skip_items_while_others_are_added_and_removed(
    store: Store, present: list[int], changes: list[tuple[bool, int]], limit: int
) -> None:
    def at(moment: int) -> Any:
        return make_template(created_at=NOW + timedelta(microseconds=moment))

    staying = [at(moment) for moment in present]
    passing = [at(moment) for removed, moment in changes if removed]
    coming = [at(moment) for removed, moment in changes if not removed]
    for template in staying + passing:
        await store.templates.add(template)

    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.templates.page(cursor=cursor, limit=limit)
        seen += [template.id for template in page.items]
        if passing:
            await store.templates.remove(passing.pop().id)
        if coming:
            await store.templates.add(coming.pop())
        cursor = page.next_cursor
        if cursor is None:
            break

    assert [seen_id for seen_id in seen if seen_id in {template.id for template in staying}] == [
        template.id for template in newest_first(staying)
    ]
    assert len(seen) == len(set(seen))
    for template in await walk(store.templates.page, 100):
        await store.templates.remove(template.id)


async def test_a_cursor_outlives_its_row(store: Store) -> None:
    templates = [make_template(created_at=NOW + timedelta(seconds=n)) for n in range(4)]
    for template in templates:
        await store.templates.add(template)
    first = await store.templates.page(limit=2)

    await store.templates.remove(first.items[-1].id)
    second = await store.templates.page(limit=2, cursor=first.next_cursor)

    assert second.items == (templates[1], templates[0])


async def test_sessions_are_filtered_by_status_and_template(store: Store) -> None:
    sessions = [
        make_session(status=status, template_id=template)
        for status in SessionStatus
        for template in ("python", "node")
        for _ in range(3)
    ]
    for session in sessions:
        await store.sessions.add(session)

    running = await walk(store.sessions.page, 2, status=SessionStatus.RUNNING)
    node = await walk(store.sessions.page, 2, template_id="node")
    both = await walk(store.sessions.page, 2, status=SessionStatus.RUNNING, template_id="node")

    assert running == newest_first([s for s in sessions if s.status == SessionStatus.RUNNING])
    assert node == newest_first([s for s in sessions if s.template_id == "node"])
    assert both == [s for s in running if s.template_id == "node"]
    assert await store.sessions.count(SessionStatus.RUNNING) == 6
    assert await walk(store.sessions.page, 2, template_id="none") == []


async def test_executions_are_filtered_by_session_and_status(store: Store) -> None:
    executions = [
        make_execution(status=status, session_id=session)
        for status in ExecutionStatus
        for session in ("sess_1", "sess_2")
        for _ in range(3)
    ]
    for execution in executions:
        await store.executions.add(execution)

    of_one = await walk(store.executions.page, 4, session_id="sess_1")
    failed = await walk(store.executions.page, 4, status=ExecutionStatus.FAILED)
    both = await walk(store.executions.page, 2, session_id="sess_1", status=ExecutionStatus.FAILED)

    assert of_one == newest_first([e for e in executions if e.session_id == "sess_1"])
    assert failed == newest_first([e for e in executions if e.status == ExecutionStatus.FAILED])
    assert both == [e for e in of_one if e.status == ExecutionStatus.FAILED]


async def test_executions_are_filtered_by_invocation_too(store: Store) -> None:
    executions = [
        make_execution(
            status=status, session_id=session, invocation_id=invocation, ordinal=2 * number + more
        )
        for number, status in enumerate(ExecutionStatus)
        for session, invocation in (
            ("sess_1", "inv_1"),
            ("sess_2", "inv_2"),
            ("sess_1", None),
            ("sess_2", None),
        )
        for more in range(2)
    ]
    for execution in executions:
        await store.executions.add(execution)

    of_one = await walk(store.executions.page, 3, invocation_id="inv_1")
    both = await walk(store.executions.page, 3, invocation_id="inv_1", session_id="sess_1")
    all_three = await walk(
        store.executions.page,
        1,
        invocation_id="inv_1",
        session_id="sess_1",
        status=ExecutionStatus.FAILED,
    )

    assert of_one == [e for e in executions if e.invocation_id == "inv_1"][::-1]
    assert both == of_one
    assert all_three == [e for e in both if e.status == ExecutionStatus.FAILED]
    assert await walk(store.executions.page, 3, invocation_id="inv_3") == []
    assert await walk(store.executions.page, 3, invocation_id="inv_1", session_id="sess_2") == []


@shared
@given(
    made=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(ExecutionStatus), st.booleans()), max_size=15
    ),
    statuses=st.lists(st.sampled_from(ExecutionStatus), unique=True),
    limit=st.integers(1, 4),
)
async def test_latest_executions_of_several_statuses_are_listed_newest_first(
    store: Store,
    made: list[tuple[int, ExecutionStatus, bool]],
    statuses: list[ExecutionStatus],
    limit: int,
) -> None:
    session_id = ids.session_id()
    executions = [
        replace(
            invoked(session_id=session_id, created_at=NOW + timedelta(microseconds=moment)),
            status=status,
            superseded=superseded,
        )
        for moment, status, superseded in made
    ]
    for execution in executions:
        await store.executions.add(execution)
    where: dict[str, Any] = {"session_id": session_id, "statuses": statuses}

    got: list[Any] = []
    page = await store.executions.latest(limit=limit, **where)
    got += page.items
    while page.next_cursor is not None:
        page = await store.executions.latest(limit=limit, cursor=page.next_cursor, **where)
        assert len(page.items) <= limit
        got += page.items

    assert got == newest_first(
        [e for e in executions if not e.superseded and (not statuses or e.status in statuses)]
    )


def cursor_of(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@on_sqlite
@pytest.mark.parametrize(
    "cursor",
    [
        "", "x", "!!!!", "====", "é", "\0", "\ud800", "A" * 100_000, "W1sxXV0",
        cursor_of(None), cursor_of([]), cursor_of([1]), cursor_of(["1", "id"]),
        cursor_of([1.5, "id"]), cursor_of([True, "id"]), cursor_of([2**63, "id"]),
        cursor_of([1, 2]), cursor_of([1, "\ud800"]), cursor_of([1, "id", 3]),
        cursor_of({"a": 1, "b": 2}), cursor_of([1, "id"]) + "=", "W" * 50_000,
    ],
)  # fmt: skip
async def test_an_unknown_cursor_is_refused(store: Store, cursor: str) -> None:
    for page in (
        store.sessions.page,
        store.executions.page,
        store.executions.latest,
        store.templates.page,
    ):
        with pytest.raises(InvalidRequest) as caught:
            await page(cursor=cursor)
        assert caught.value.code == "bad_cursor"


@shared
@given(cursor=st.text(st.characters(blacklist_categories=[])) | st.binary().map(
    lambda data: base64.urlsafe_b64encode(data).decode()
))  # fmt: skip
async def test_arbitrary_text_as_a_cursor_does_no_harm(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        await store.templates.page(cursor=cursor)


async def test_a_limit_of_zero_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest):
        await store.templates.page(limit=0)


async def test_sessions_with_expired_timers_are_found_by_node(store: Store) -> None:
    def expiring(seconds: float, status: SessionStatus = SessionStatus.RUNNING) -> Any:
        return make_session(status=status, expires_at=NOW + timedelta(seconds=seconds))

    long_ago, creating = expiring(-60), expiring(-30, SessionStatus.CREATING)
    now, soon = expiring(0), expiring(0.000001)
    elsewhere = replace(expiring(-60), runtime_node="another")
    ended = [expiring(-90, status) for status in SessionStatus if status.ended]
    for session in (now, soon, creating, long_ago, elsewhere, *ended):
        await store.sessions.add(session)
    node_id = long_ago.runtime_node

    found = await store.sessions.timed_out(NOW, node_id=node_id, limit=10)
    assert found == [long_ago, creating, now]
    assert await store.sessions.timed_out(NOW, node_id=node_id, limit=2) == found[:2]
    assert await store.sessions.timed_out(NOW, node_id="another", limit=2) == [elsewhere]


async def test_unsettled_sessions_are_found_by_node(store: Store) -> None:
    def wanting(wanted: Wanted, status: SessionStatus, at: float = 0, **more: Any) -> Any:
        return make_session(
            wanted=wanted, status=status, updated_at=NOW + timedelta(seconds=at), **more
        )

    settled = [
        wanting(Wanted.RUNNING, SessionStatus.RUNNING),
        wanting(Wanted.STOPPED, SessionStatus.STOPPED),
        wanting(Wanted.DESTROYED, SessionStatus.TERMINATED, workspace=None, instance_id=None),
    ]
    stopping = wanting(Wanted.STOPPED, SessionStatus.RUNNING, -1)
    left = wanting(Wanted.DESTROYED, SessionStatus.TERMINATED, -2, workspace="there")
    later = wanting(
        Wanted.RUNNING, SessionStatus.ERROR, -3, retry_at=NOW + timedelta(seconds=0.000001)
    )
    for session in (*settled, stopping, left, later):
        await store.sessions.add(session)

    node_id = stopping.runtime_node
    assert await store.sessions.unsettled(NOW, node_id=node_id, limit=10) == [left, stopping]
    assert await store.sessions.unsettled(NOW, node_id=node_id, limit=1) == [left]
    assert await store.sessions.unsettled(NOW, node_id="another", limit=10) == []
    done = replace(stopping, status=SessionStatus.STOPPED, instance_id=None)
    await store.sessions.save(done)
    assert await store.sessions.unsettled(NOW, node_id=node_id, limit=10) == [left]


async def test_activity_is_recorded_without_a_new_version(store: Store) -> None:
    session = make_session(idle_timeout=60, expires_at=NOW + timedelta(days=1))
    await store.sessions.add(session)
    node_id = session.runtime_node
    idle = NOW + timedelta(seconds=61)
    assert await store.sessions.timed_out(idle, node_id=node_id, limit=1) != []

    assert await store.sessions.touch(session, NOW + timedelta(seconds=30))

    found = await store.sessions.get(session.id)
    assert found == replace(session, active_at=NOW + timedelta(seconds=30))
    assert await store.sessions.timed_out(idle, node_id=node_id, limit=1) == []
    assert not await store.sessions.touch(replace(session, version=session.version + 1), NOW)


async def test_a_delay_is_explained_without_a_new_version(store: Store) -> None:
    session = make_session(status=SessionStatus.CREATING)
    await store.sessions.add(session)

    assert await store.sessions.explain(session, "no machine has room")

    found = await store.sessions.get(session.id)
    assert found == replace(session, message="no machine has room")
    later = replace(session, version=session.version + 1)
    assert not await store.sessions.explain(later, "too late")
    assert await store.sessions.get(session.id) == found


async def test_unfinished_sessions_are_listed_by_id(store: Store) -> None:
    sessions = [make_session(status=status) for status in SessionStatus for _ in range(3)]
    for session in sessions:
        await store.sessions.add(session)
    unfinished = sorted((s for s in sessions if not s.status.ended), key=lambda s: s.id)

    assert await store.sessions.unfinished(limit=100) == unfinished
    assert await store.sessions.unfinished(limit=2, after=unfinished[1].id) == unfinished[2:4]
    assert await store.sessions.unfinished(limit=2, after=unfinished[-1].id) == []


async def test_unfinished_executions_are_listed_by_id(store: Store) -> None:
    executions = [make_execution(status=status) for status in ExecutionStatus for _ in range(3)]
    for execution in executions:
        await store.executions.add(execution)
    unfinished = sorted((e for e in executions if not e.status.ended), key=lambda e: e.id)

    assert await store.executions.unfinished(limit=100) == unfinished
    assert await store.executions.unfinished(limit=2, after=unfinished[1].id) == unfinished[2:4]

    await store.executions.save(make.completed(unfinished[0]))
    assert await store.executions.unfinished(limit=100) == unfinished[1:]


async def test_a_saved_status_moves_an_item_between_lists(store: Store) -> None:
    session = make_session()
    await store.sessions.add(session)

    saved = await store.sessions.save(replace(session, status=SessionStatus.TERMINATED))

    assert (await store.sessions.page(status=SessionStatus.RUNNING)).items == ()
    assert (await store.sessions.page(status=SessionStatus.TERMINATED)).items == (saved,)
    assert await store.sessions.count(SessionStatus.RUNNING) == 0


async def test_holdings_of_a_node_are_listed_by_id(store: Store) -> None:
    there = sorted(
        (make_session(status=status, workspace=f"of {status}") for status in SessionStatus),
        key=lambda session: session.id,
    )
    elsewhere = make_session(runtime_node="another", workspace="there")
    cleared = make_session(status=SessionStatus.TERMINATED)
    for session in (*there, elsewhere, cleared):
        await store.sessions.add(session)
    # Including ended sessions: their files must still be saved and removed.
    held = [Holding(session.id, session.instance_id, session.workspace) for session in there]
    node_id = there[0].runtime_node

    assert await store.sessions.holdings(node_id, limit=100) == held
    assert await store.sessions.holdings(node_id, limit=2, after=held[0].session_id) == held[1:3]
    assert await store.sessions.holdings("nowhere", limit=1) == []
