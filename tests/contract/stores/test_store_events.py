"""Events: stored with their changes, numbered in one order, and deleted by age."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import Conflict
from atoll.model.event import Event, FeedRange, execution_event
from atoll.settings import DatabaseSettings
from atoll.stores.sql import events as sql_events
from atoll.stores.sql.store import SqlStore

from .store_entities import (
    NOW,
    PATIENT,
    completed,
    make_execution,
    make_session,
    make_template,
)

if TYPE_CHECKING:
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


def event(type_: str = "session.created", subject: str = "s", at: int = 0) -> Event:
    return Event(type_, subject, NOW + timedelta(seconds=at), {"text": "NUL \0, 𝄞"})


async def add_events(store: Store, *events: Event) -> None:
    for one in events:
        await store.executions.add(make_execution(), event=one)


async def read(store: Store, after: int = 0, **asked: Any) -> list[Event]:
    stretch = await store.events.after(after, **asked)
    return list(stretch.events)


async def test_an_event_is_listed_once_it_is_numbered(store: Store) -> None:
    await add_events(store, event("a.x"), event("a.y"))
    assert await read(store) == []
    assert await store.events.range() == FeedRange(1, 0)

    assert await store.events.number() == 2
    assert await store.events.number() == 0

    assert await read(store) == [
        replace(event("a.x"), number=1),
        replace(event("a.y"), number=2),
    ]
    assert await store.events.range() == FeedRange(1, 2)


async def test_an_event_is_stored_if_and_only_if_its_change_is(store: Store) -> None:
    execution, session, template = make_execution(), make_session(), make_template()
    await store.executions.add(execution, event=event("execution.submitted"))
    with pytest.raises(Conflict):
        await store.executions.add(execution, event=event("wrong"))
    done = await store.executions.save(completed(execution), event=event("execution.completed"))
    with pytest.raises(Conflict):
        await store.executions.save(completed(execution), event=event("wrong"))
    following = make_execution(invocation_id=execution.invocation_id, ordinal=2)
    await store.executions.add_after(following, done, event=event("execution.again"))
    with pytest.raises(Conflict):
        await store.executions.add_after(make_execution(), done, event=event("wrong"))
    await store.sessions.add(session, event=event("session.created"))
    with pytest.raises(Conflict):
        await store.sessions.add(session, event=event("wrong"))
    await store.sessions.save(session, event=event("session.changed"))
    await store.templates.add(template, event=event("template.created"))
    with pytest.raises(Conflict):
        await store.templates.add(template, event=event("wrong"))
    newer = await store.templates.save(template, event=event("template.building"))
    with pytest.raises(Conflict):
        await store.templates.save(template, event=event("wrong"))
    await store.templates.supersede(newer, template, event=event("template.changed"))
    with pytest.raises(Conflict):
        await store.templates.supersede(newer, template, event=event("wrong"))
    await store.templates.remove(template.id, event=event("template.removed"))
    await store.templates.remove(template.id, event=event("wrong"))
    await store.events.number()

    assert [one.type for one in await read(store)] == [
        "execution.submitted",
        "execution.completed",
        "execution.again",
        "session.created",
        "session.changed",
        "template.created",
        "template.building",
        "template.changed",
        "template.removed",
    ]


async def test_of_concurrent_saves_only_the_one_that_succeeds_stores_its_event(
    store: Store,
) -> None:
    execution = make_execution()
    await store.executions.add(execution)
    changed = completed(execution)

    answers = await asyncio.gather(
        *(store.executions.save(changed, event=event("a.x", at=n)) for n in range(20)),
        return_exceptions=True,
    )

    (winner,) = [n for n, answer in enumerate(answers) if not isinstance(answer, Conflict)]
    await store.events.number()
    assert await read(store) == [replace(event("a.x", at=winner), number=1)]


async def test_numbers_have_no_gaps_with_concurrent_numbering(store: Store, url: str) -> None:
    """Concurrent writers, numberers and a reader; the reader never misses an earlier event."""
    others: list[SqlStore] = []
    if ":memory:" not in url:
        for _ in range(2):
            other = SqlStore([url], sqlite=PATIENT, database=DatabaseSettings())
            await other.open()
            others.append(other)
    stores: list[Store] = [store, *others]
    count, seen = 60, list[Event]()
    writing = [
        asyncio.create_task(add_events(one, *(event(f"w{w}.x", str(n)) for n in range(count))))
        for w, one in enumerate(stores)
    ]

    async def numbering(one: Store, limit: int) -> None:
        while not all(task.done() for task in writing) or await one.events.number(limit=limit):
            await one.events.number(limit=limit)

    async def reading() -> None:
        while len(seen) < count * len(stores):
            stretch = await stores[-1].events.after(len(seen), limit=7)
            seen.extend(stretch.events)

    try:
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(numbering(one, 3 + n) for n, one in enumerate(stores)), reading()
            )
    finally:
        await asyncio.gather(*writing)
        for one in others:
            await one.close()

    assert [one.number for one in seen] == list(range(1, count * len(stores) + 1))
    for w in range(len(stores)):
        own = [one.subject for one in seen if one.type == f"w{w}.x"]
        assert own == [str(n) for n in range(count)]


async def test_events_are_selected_by_type_subject_and_limit(store: Store) -> None:
    types = ["session.created", "session.stopped", "sessions.x", "execution.failed", "session/x"]
    await add_events(store, *(event(type_, subject) for type_ in types for subject in ("a", "b")))
    await store.events.number()

    async def chosen(*patterns: str, **asked: Any) -> list[tuple[str, str]]:
        found = await read(store, types=patterns, **asked)
        return [(one.type, one.subject) for one in found]

    assert await chosen("session.*", subject="a") == [
        ("session.created", "a"),
        ("session.stopped", "a"),
    ]
    assert await chosen("execution.failed", "session.stopped", subject="b") == [
        ("session.stopped", "b"),
        ("execution.failed", "b"),
    ]
    assert len(await chosen("*")) == 10
    assert await chosen("session.", "%", "_ession.created") == []
    assert [one.number for one in await read(store, 4, limit=2)] == [5, 6]


async def test_a_search_without_matches_returns_its_position(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_events, "SEARCH_LIMIT", 4)
    await add_events(store, *(event("a.x") for _ in range(9)), event("b.x"))
    await store.events.number()

    first = await store.events.after(0, types=["b.*"])
    second = await store.events.after(first.through, types=["b.*"])
    third = await store.events.after(second.through, types=["b.*"])

    assert [first.through, second.through, third.through] == [4, 8, 10]
    assert [len(one.events) for one in (first, second, third)] == [0, 0, 1]
    full = await store.events.after(0, limit=2)
    assert (len(full.events), full.through) == (2, 2)
    assert (await store.events.after(10)).through == 10


async def test_old_events_expire_from_the_start_in_batches(store: Store) -> None:
    ages = [0, 1, 9, 2, 3]
    await add_events(store, *(event(at=at) for at in ages))
    await store.events.number()
    await add_events(store, event(at=0))
    before = NOW + timedelta(seconds=5)

    assert await store.events.expire(before, limit=1) == 1
    assert await store.events.range() == FeedRange(2, 5)
    assert await store.events.expire(before, limit=10) == 1
    assert await store.events.expire(before, limit=10) == 0

    # The third is young still: nothing behind it goes, so there is no hole.
    assert [one.number for one in await read(store)] == [3, 4, 5]
    assert (await store.events.after(0)).first == 3
    assert await store.events.expire(NOW + timedelta(seconds=10), limit=10) == 3
    assert await store.events.range() == FeedRange(6, 5)
    # What has no number yet was not forgotten.
    assert await store.events.number() == 1
    assert [one.number for one in await read(store, 5)] == [6]


async def test_events_of_executions_contain_neither_code_nor_output(store: Store) -> None:
    execution = make_execution()
    done = completed(execution, stdout=b"secret")
    recorded = execution_event(done, done.status, NOW)

    assert recorded.type == "execution.completed"
    assert set(recorded.data) == {"session_id", "invocation_id", "status", "cause", "retry_count"}
