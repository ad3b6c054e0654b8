"""API keys: cached beyond an outage of the database, and refused once they are removed."""

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
        """Block reads that start from now on until the returned event is set."""
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


class Environment:
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
async def environment(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Environment]:
    url = f"sqlite:///{tmp_path / 'atoll.db'}"
    store = SqlStore([url], sqlite=SqliteSettings(), database=DatabaseSettings())
    await store.open()
    yield Environment(store)
    await store.close()


async def test_a_key_is_found_only_by_its_secret(environment: Environment) -> None:
    key, secret = await environment.made()
    other, other_secret = await environment.keys.create("b", Scope.READ)
    assert await environment.keys.find(secret) == key
    assert await environment.keys.find(other_secret) == other
    assert await environment.keys.find(ids.api_key()) is None
    assert await environment.keys.find("") is None


async def test_keys_are_not_read_for_every_request(environment: Environment) -> None:
    _, secret = await environment.made()
    reads = environment.database.reads
    for _ in range(10):
        await environment.keys.find(secret)
        environment.later(REFRESH_SECONDS / 10)
    assert environment.database.reads == reads

    environment.later()
    await asyncio.gather(*(environment.keys.find(secret) for _ in range(10)))
    assert environment.database.reads == reads + 1


async def test_keys_created_or_removed_by_another_process_apply_within_seconds(
    environment: Environment,
) -> None:
    _, secret = await environment.made()
    there = environment.another()
    key, other_secret = await there.create("b", Scope.FULL)
    assert await environment.keys.find(other_secret) is None
    environment.later()
    assert await environment.keys.find(other_secret) == key

    assert await there.remove(key.id)
    environment.later()
    assert await environment.keys.find(other_secret) is None
    assert await environment.keys.find(secret) is not None


async def test_known_keys_stay_valid_while_the_database_is_unavailable(
    environment: Environment,
) -> None:
    key, secret = await environment.made()
    await environment.store.close()
    for _ in range(10):
        environment.later()
        assert await environment.keys.find(secret) == key
        assert await environment.keys.find(ids.api_key()) is None


async def test_known_keys_expire_after_the_limit_of_the_cache(environment: Environment) -> None:
    key, secret = await environment.made()
    await environment.store.close()
    environment.later(TTL.total_seconds())
    assert await environment.keys.find(secret) == key

    environment.later()
    for one in (secret, ids.api_key()):
        with pytest.raises(TemporaryError) as refused:
            await environment.keys.find(one)
        assert refused.value.code == "database_unavailable"

    await environment.store.open()
    assert await environment.keys.find(secret) == key


async def test_a_removed_key_is_refused_at_once_and_for_good(environment: Environment) -> None:
    key, secret = await environment.made()
    assert await environment.keys.remove(key.id)
    assert await environment.keys.find(secret) is None

    await environment.store.close()
    environment.later()
    assert await environment.keys.find(secret) is None


async def test_a_list_read_before_a_removal_does_not_restore_the_key(
    environment: Environment,
) -> None:
    key, secret = await environment.made()
    _, kept = await environment.keys.create("b", Scope.FULL)
    environment.later()
    late = environment.database.hold()
    slow = asyncio.create_task(environment.keys.find(kept))
    await environment.database.asked.wait()
    assert await environment.keys.remove(key.id)
    environment.database.hold().set()
    after = asyncio.create_task(environment.keys.find(secret))
    # Done already, unless it waits for the one before it.
    await asyncio.wait([after], timeout=0.2)
    late.set()
    assert await slow is not None
    assert await after is None
    assert await environment.keys.find(secret) is None

    await environment.store.close()
    environment.later()
    assert await environment.keys.find(secret) is None


async def test_a_silent_database_delays_requests_only_briefly(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.01)
    key, secret = await environment.made()
    environment.database.hold()
    environment.later()
    async with asyncio.timeout(30):
        assert await environment.keys.find(secret) == key
    reads = environment.database.reads
    assert await environment.keys.find(secret) == key
    assert environment.database.reads == reads


async def test_the_first_read_has_no_timeout(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = await environment.made()
    fresh = environment.another()
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.0)
    late = environment.database.hold()
    found = asyncio.create_task(fresh.find(secret))
    await environment.database.asked.wait()
    # Longer than the patience that others have.
    await asyncio.sleep(0.05)
    assert not found.done()
    late.set()
    assert await found == key


async def test_without_a_first_read_every_key_is_refused(environment: Environment) -> None:
    _, secret = await environment.made()
    fresh = environment.another()
    await environment.store.close()
    with pytest.raises(TemporaryError) as refused:
        await fresh.find(secret)
    assert refused.value.code == "database_unavailable"


async def test_all_waiting_requests_are_refused_with_the_first(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 0.05)
    _, secret = await environment.made()
    environment.later(TTL.total_seconds() + 1)
    environment.database.hold()
    reads = environment.database.reads
    errors = await asyncio.gather(
        *(environment.keys.find(secret) for _ in range(20)), return_exceptions=True
    )
    assert all(isinstance(error, TemporaryError) for error in errors)
    assert environment.database.reads == reads + 1

    monkeypatch.setattr(module, "REFRESH_TIMEOUT", 60.0)
    environment.database.hold().set()
    assert await environment.keys.find(secret) is not None
