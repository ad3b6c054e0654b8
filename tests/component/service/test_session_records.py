"""Sessions whose record was written, or not, without a confirmation of the database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.app.application import application
from atoll.errors import DatabaseUnavailable, TemporaryError
from atoll.model.session import SessionStatus
from atoll.service.sessions.new_session import NewSession
from atoll.settings import PoolSettings, SessionSettings, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.model.event import Event
    from atoll.model.session import Session
    from atoll.service.sessions.service import Sessions
    from atoll.stores.stale_cache import CachingStore

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def sessions_of(place: Path) -> AsyncIterator[tuple[Sessions, CachingStore]]:
    settings = Settings(
        data_dir=place, pool=PoolSettings(size=0), session=SessionSettings(disk=16 * 2**20)
    )
    async with application(settings, embedded=True) as app:
        yield app.sessions, app.sessions._store


async def create(sessions: Sessions, session_id: str) -> Session:
    return await sessions.create(NewSession(lambda resources: resources), session_id=session_id)


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
async def test_a_session_whose_response_was_lost_is_found_by_a_repeated_request(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    async with sessions_of(tmp_path) as (sessions, store):
        save, session_id = store.sessions.save, ids.session_id()

        async def cut_off(session: Session, *, event: Event | None = None) -> Session:
            if written:
                await save(session, event=event)
            raise DatabaseUnavailable("cut off")

        monkeypatch.setattr(store.sessions, "save", cut_off)
        with pytest.raises(TemporaryError):
            await create(sessions, session_id)
        monkeypatch.setattr(store.sessions, "save", save)

        session = await create(sessions, session_id)
        assert session.status is SessionStatus.RUNNING
        live = await sessions._starter.connect(session_id)
        assert (await live.link.call("processes"))["processes"] == []
        await sessions._starter._replica.background.settle(30)
        assert [found.id for found in await store.instances.all()] == [live.instance.id]


async def test_two_concurrent_creations_return_the_same_session(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sessions_of(tmp_path) as (sessions, store):
        get, looks = store.sessions.get, 0
        first = await create(sessions, ids.session_id())

        async def too_early(session_id: str) -> Session | None:
            nonlocal looks
            looks += 1
            return None if looks == 1 else await get(session_id)

        monkeypatch.setattr(store.sessions, "get", too_early)
        assert (await create(sessions, first.id)).instance_id == first.instance_id


async def test_a_change_is_accepted_even_if_the_session_ends_right_after_it(
    tmp_path: Path, bubblewrap: str
) -> None:
    """A time-out that has passed already ends the session before the change is announced."""
    async with sessions_of(tmp_path) as (sessions, _):
        changed = await create(sessions, ids.session_id())
        ended = await sessions.delete(changed.id)
        assert ended.status.ended

        await sessions._starter._connections.announce(changed)
