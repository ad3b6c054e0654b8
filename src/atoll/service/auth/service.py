"""API keys: who may call. Kept hashed; compared in constant time."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

from atoll import ids
from atoll.errors import DatabaseUnavailable, TemporaryError
from atoll.model.key import Key, Scope, digest

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.settings import RecallSettings
    from atoll.stores.base import Store

RELOAD_SECONDS = 2.0
PATIENCE_SECONDS = 1.0
"""How long the database may take to tell the keys, when others are known from before."""


class ApiKeys:
    def __init__(self, store: Store, clock: Clock, settings: RecallSettings) -> None:
        self._store = store
        self._clock = clock
        self._kept = settings.ttl.total_seconds()
        self._known: list[Key] = []
        self._loaded = self._read = float("-inf")
        self._reading = asyncio.Lock()
        self._failures = 0
        self._changes = 0
        """How many were made here, so that what was read before the last one is not believed."""

    async def find(self, secret: str) -> Key | None:
        """
        The key that this secret belongs to.

        Every stored key is compared, each in constant time, so the answer's time tells nothing.
        Keys made or removed by another process count within seconds. While the database is away,
        those that were known last are good for as long as other things are remembered.
        """
        await self._refresh()
        given = digest(secret)
        found = None
        for key in self._known:
            if hmac.compare_digest(key.digest, given):
                found = key
        return found

    async def exists(self, key_id: str) -> bool:
        """Whether there is a key of this id; as current as `find`."""
        await self._refresh()
        return any(key.id == key_id for key in self._known)

    async def _refresh(self) -> None:
        if not self._fresh:
            failures = self._failures
            async with self._reading:
                if failures < self._failures:
                    # One after the other they would wait for longer than anybody does.
                    raise _unavailable()
                if not self._fresh:  # Nobody else has read them meanwhile.
                    await self._reload()

    @property
    def _fresh(self) -> bool:
        return self._clock.monotonic() - self._loaded <= RELOAD_SECONDS

    async def _reload(self) -> None:
        now = self._clock.monotonic()
        try:
            known = self._read > float("-inf")
            async with asyncio.timeout(PATIENCE_SECONDS if known else None):
                self._known = await self._all()
            self._read = now
        except (TemporaryError, TimeoutError) as error:
            if now - self._read > self._kept:
                self._failures += 1
                raise _unavailable() from error
        self._loaded = self._clock.monotonic()

    async def _all(self) -> list[Key]:
        while True:
            changes = self._changes
            found = await self._store.keys.all()
            if changes == self._changes:
                return found

    def _changed(self) -> None:
        self._changes += 1
        self._loaded = float("-inf")

    async def create(self, name: str, scope: Scope) -> tuple[Key, str]:
        """A new key and its secret, which is shown this once."""
        secret = ids.api_key()
        return await self.adopt(name, scope, secret), secret

    async def adopt(self, name: str, scope: Scope, secret: str) -> Key:
        """Make a given secret a key; nothing changes when it is one."""
        key = Key(ids.key_id(), name, digest(secret), scope, self._clock.now())
        await self._store.keys.add(key)
        self._changed()
        return key

    async def list(self) -> list[Key]:
        return await self._store.keys.all()

    async def remove(self, key_id: str) -> bool:
        removed = await self._store.keys.remove(key_id)
        self._known = [key for key in self._known if key.id != key_id]
        self._changed()
        return removed


def _unavailable() -> TemporaryError:
    return DatabaseUnavailable("The database does not answer, so keys cannot be checked.")
