"""Keys: known a while longer than the database, gone when they were removed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.errors import TemporaryError
from atoll.model.api_key import ApiKey, Scope
from atoll.service.auth import service as module
from atoll.service.auth.service import REFRESH_SECONDS, ApiKeys
from atoll.settings import DatabaseSettings, RecallSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore
from atoll.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

TTL = timedelta(seconds=300)


class Slow:
    """The keys of a real store, of a database that answers when it is let."""

    def __init__(self, store: SqlStore) -> None:
        self._keys = store.api_keys
        self.reads = 0
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    def hold(self) -> asyncio.Event:
        """Let reads that begin from now on wait for what is returned."""
        self.asked.clear()
        self.answers = asyncio.Event()
        return self.answers

    async def all(self) -> list[ApiKey]:
        self.reads += 1
        found, answers = await self._keys.all(), self.answers
        self.asked.set()
        await answers.wait()
        return found

    async def add(self, key: ApiKey) -> None:
        await self._keys.add(key)

    async def remove(self, key_id: str) -> bool:
        return await self._keys.remove(key_id)


class Ground:
    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.clock = ManualClock()
        self.database = store.api_keys = Slow(store)
        self.keys = self.another()

    def another(self) -> ApiKeys:
        return ApiKeys(self.store, self.clock, RecallSettings(ttl=TTL))

    async def made(self) -> tuple[ApiKey, str]:
        """A key that was found once."""
        key, secret = await self.keys.create("a", Scope.FULL)
        assert await self.keys.find(secret) == key
        return key, secret

    def later(self, seconds: float = REFRESH_SECONDS + 0.1) -> None:
        self.clock.time += seconds


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for a database that is slow by chance; tests about patience have their own."""
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 60.0)


@pytest.fixture
async def ground(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Ground]:
    url = f"sqlite:///{tmp_path / 'atoll.db'}"
    store = SqlStore([url], sqlite=SqliteSettings(), database=DatabaseSettings())
    await store.open()
    yield Ground(store)
    await store.close()


async def test_a_key_is_found_by_its_secret_alone(ground: Ground) -> None:
    key, secret = await ground.made()
    other, other_secret = await ground.keys.create("b", Scope.READ)
    assert await ground.keys.find(secret) == key
    assert await ground.keys.find(other_secret) == other
    assert await ground.keys.find(ids.api_key()) is None
    assert await ground.keys.find("") is None


async def test_keys_are_not_read_for_every_request(ground: Ground) -> None:
    _, secret = await ground.made()
    reads = ground.database.reads
    for _ in range(10):
        await ground.keys.find(secret)
        ground.later(REFRESH_SECONDS / 10)
    assert ground.database.reads == reads

    ground.later()
    await asyncio.gather(*(ground.keys.find(secret) for _ in range(10)))
    assert ground.database.reads == reads + 1


async def test_what_another_process_made_or_removed_counts_within_seconds(ground: Ground) -> None:
    _, secret = await ground.made()
    there = ground.another()
    key, other_secret = await there.create("b", Scope.FULL)
    assert await ground.keys.find(other_secret) is None
    ground.later()
    assert await ground.keys.find(other_secret) == key

    assert await there.remove(key.id)
    ground.later()
    assert await ground.keys.find(other_secret) is None
    assert await ground.keys.find(secret) is not None


async def test_keys_stay_known_while_the_database_is_away_and_others_unknown(
    ground: Ground,
) -> None:
    key, secret = await ground.made()
    await ground.store.close()
    for _ in range(10):
        ground.later()
        assert await ground.keys.find(secret) == key
        assert await ground.keys.find(ids.api_key()) is None


async def test_not_for_longer_than_other_things_are_remembered(ground: Ground) -> None:
    key, secret = await ground.made()
    await ground.store.close()
    ground.later(TTL.total_seconds())
    assert await ground.keys.find(secret) == key

    ground.later()
    for one in (secret, ids.api_key()):
        with pytest.raises(TemporaryError) as refused:
            await ground.keys.find(one)
        assert refused.value.code == "database_unavailable"

    await ground.store.open()
    assert await ground.keys.find(secret) == key


async def test_a_removed_key_is_unknown_at_once_and_stays_so(ground: Ground) -> None:
    key, secret = await ground.made()
    assert await ground.keys.remove(key.id)
    assert await ground.keys.find(secret) is None

    await ground.store.close()
    ground.later()
    assert await ground.keys.find(secret) is None


async def test_a_list_that_was_read_before_a_key_was_removed_does_not_bring_it_back(
    ground: Ground,
) -> None:
    key, secret = await ground.made()
    _, kept = await ground.keys.create("b", Scope.FULL)
    ground.later()
    late = ground.database.hold()
    slow = asyncio.create_task(ground.keys.find(kept))
    await ground.database.asked.wait()
    assert await ground.keys.remove(key.id)
    ground.database.hold().set()
    after = asyncio.create_task(ground.keys.find(secret))
    # Done already, unless it waits for the one before it.
    await asyncio.wait([after], timeout=0.2)
    late.set()
    assert await slow is not None
    assert await after is None
    assert await ground.keys.find(secret) is None

    await ground.store.close()
    ground.later()
    assert await ground.keys.find(secret) is None


async def test_a_database_that_does_not_answer_holds_up_nobody_for_long(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.01)
    key, secret = await ground.made()
    ground.database.hold()
    ground.later()
    async with asyncio.timeout(30):
        assert await ground.keys.find(secret) == key
    reads = ground.database.reads
    assert await ground.keys.find(secret) == key
    assert ground.database.reads == reads


async def test_the_first_read_takes_the_time_that_it_takes(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = await ground.made()
    fresh = ground.another()
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.0)
    late = ground.database.hold()
    found = asyncio.create_task(fresh.find(secret))
    await ground.database.asked.wait()
    # Longer than the patience that others have.
    await asyncio.sleep(0.05)
    assert not found.done()
    late.set()
    assert await found == key


async def test_without_a_first_read_every_key_is_refused(ground: Ground) -> None:
    _, secret = await ground.made()
    fresh = ground.another()
    await ground.store.close()
    with pytest.raises(TemporaryError) as refused:
        await fresh.find(secret)
    assert refused.value.code == "database_unavailable"


async def test_all_who_wait_are_refused_with_the_first(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.05)
    _, secret = await ground.made()
    ground.later(TTL.total_seconds() + 1)
    ground.database.hold()
    reads = ground.database.reads
    told = await asyncio.gather(
        *(ground.keys.find(secret) for _ in range(20)), return_exceptions=True
    )
    assert all(isinstance(error, TemporaryError) for error in told)
    assert ground.database.reads == reads + 1

    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 60.0)
    ground.database.hold().set()
    assert await ground.keys.find(secret) is not None
