"""The feed inside one process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import Conflict, Forbidden, InvalidRequest
from atoll.model.event import Event, FeedPage
from atoll.reconcile.events import EventNumbering, EventSweep
from atoll.service.events import service
from atoll.service.events.service import Feed, types_of
from atoll.settings import CoordinationSettings, DatabaseSettings, EventSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore
from tests.contract.stores.store_entities import NOW, make_execution

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def feeding() -> AsyncIterator[tuple[SqlStore, Feed]]:
    clock = SystemClock()
    store = SqlStore(["sqlite:///:memory:"], sqlite=SqliteSettings(), database=DatabaseSettings())
    await store.open()
    coordination = MemoryCoordination("me", CoordinationSettings(), timedelta(hours=1), clock)
    await coordination.open()
    try:
        yield store, Feed(store, coordination, clock)
    finally:
        await coordination.close()
        await store.close()


async def add_events(store: SqlStore, count: int = 1, type_: str = "session.x") -> None:
    for _ in range(count):
        await store.executions.add(make_execution(), event=Event(type_, "s", NOW))


async def allowed() -> None:
    """The follower may continue."""


@pytest.mark.parametrize(
    "text", ["", "a", "a.", ".b", "a.b.c", "a.*.*", "*.b", "A.b", "a.b,", "a b"]
)
def test_an_invalid_event_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        types_of(text)


def test_repeated_types_are_listed_once() -> None:
    assert types_of("a.b,a.*,a.b,*") == ("a.b", "a.*", "*")
    assert types_of(None) == ()


async def test_a_page_contains_all_events_stored_before() -> None:
    async with feeding() as (store, feed):
        await add_events(store, 3)

        page = await feed.page(None, (), None, limit=2, wait=0)
        following = await feed.page(page.through, (), None, limit=2, wait=0)

        assert [one.number for one in (*page.events, *following.events)] == [1, 2, 3]


async def test_concurrent_reads_at_one_position_share_a_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with feeding() as (store, feed):
        await add_events(store)
        await feed.number()
        reads, after = 0, store.events.after

        async def counted(*given: object, **more: object) -> FeedPage:
            nonlocal reads
            reads += 1
            return await after(*given, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(store.events, "after", counted)
        found = await asyncio.gather(*(feed.read(0) for _ in range(50)))

        assert all(one == found[0] for one in found)
        assert reads == 1
        assert feed._reads == {}


async def test_a_cancelled_reader_does_not_cancel_the_shared_read() -> None:
    async with feeding() as (store, feed):
        await add_events(store)
        await feed.number()
        first, second = (asyncio.create_task(feed.read(0)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()

        assert len((await second).events) == 1


async def test_a_follower_is_woken_by_the_sequencer_and_ends_with_the_server() -> None:
    async with feeding() as (store, feed):
        sequencer = asyncio.create_task(EventNumbering(feed).run())
        try:
            stretches = feed.follow(0, ("session.*",), None, allowed)
            assert (await anext(stretches)).events == ()
            coming = asyncio.ensure_future(anext(stretches))
            await add_events(store, 1)
            feed.event_stored()
            assert [one.number for one in (await coming).events] == [1]
            last = asyncio.ensure_future(anext(stretches))
            await asyncio.sleep(0)
            feed.close()
            with pytest.raises(StopAsyncIteration):
                await last
        finally:
            sequencer.cancel()
            await asyncio.gather(sequencer, return_exceptions=True)


async def test_a_follower_that_fell_behind_gets_events_expired() -> None:
    async with feeding() as (store, feed):
        await add_events(store, 5)
        await feed.number()
        settings = EventSettings(keep=timedelta(0))
        await EventSweep(store, SystemClock(), settings).once()

        with pytest.raises(Conflict) as expired:
            await anext(feed.follow(2, (), None, allowed))
        assert expired.value.code == "events_expired"
        assert expired.value.details == {"first": 6}
        with pytest.raises(Conflict):
            await feed.position(6)
        assert await feed.position(5) == 5
        assert await feed.position(None) == 5


async def test_a_follower_whose_key_was_removed_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "CHECK_SECONDS", 0.0)

    async def refused() -> None:
        raise Forbidden("No.")

    async with feeding() as (_, feed):
        with pytest.raises(Forbidden):
            await anext(feed.follow(0, (), None, refused))
