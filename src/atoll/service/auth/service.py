"""
API keys. They are stored hashed and compared in constant time.

This process caches all keys. The cache is refreshed every few seconds; while the database is
unavailable it stays valid for as long as other cached records (`recall.ttl`).
"""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

from atoll import ids
from atoll.errors import DatabaseUnavailable, TemporaryError
from atoll.model.api_key import ApiKey, Scope, digest

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.settings import RecallSettings
    from atoll.stores.base import Store

REFRESH_SECONDS = 2.0
REFRESH_TIMEOUT = 1.0
"""Time limit for a refresh, in seconds, if an older cache can be used instead."""


class ApiKeys:
    def __init__(self, store: Store, clock: Clock, settings: RecallSettings) -> None:
        self._store = store
        self._clock = clock
        self._max_age = settings.ttl.total_seconds()
        self._keys: list[ApiKey] = []
        self._checked_at = self._read_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._failures = 0
        self._changes = 0
        """Changes made by this process: a read that began before the last one is repeated."""

    async def find(self, secret: str) -> ApiKey | None:
        """
        The key of a secret.

        Every stored key is compared, each in constant time, so the duration reveals nothing.
        Changes by other processes take effect within seconds.
        """
        await self._refresh()
        given = digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, given):
                found = key
        return found

    async def exists(self, key_id: str) -> bool:
        """As current as `find`."""
        await self._refresh()
        return any(key.id == key_id for key in self._keys)

    async def create(self, name: str, scope: Scope) -> tuple[ApiKey, str]:
        """A new key and its secret, which cannot be read again."""
        secret = ids.api_key()
        return await self.adopt(name, scope, secret), secret

    async def adopt(self, name: str, scope: Scope, secret: str) -> ApiKey:
        """Store a given secret as a key; does nothing if it is one already."""
        key = ApiKey(ids.key_id(), name, digest(secret), scope, self._clock.now())
        await self._store.api_keys.add(key)
        self._invalidate()
        return key

    async def remove(self, key_id: str) -> bool:
        removed = await self._store.api_keys.remove(key_id)
        self._keys = [key for key in self._keys if key.id != key_id]
        self._invalidate()
        return removed

    async def _refresh(self) -> None:
        if not self._fresh:
            failures = self._failures
            async with self._refreshing:
                if failures < self._failures:
                    # Requests that queued here would otherwise time out one after the other.
                    raise _unavailable()
                if not self._fresh:  # Another request may have refreshed it.
                    await self._read()

    @property
    def _fresh(self) -> bool:
        return self._clock.monotonic() - self._checked_at <= REFRESH_SECONDS

    async def _read(self) -> None:
        now = self._clock.monotonic()
        try:
            has_cache = self._read_at > float("-inf")
            async with asyncio.timeout(REFRESH_TIMEOUT if has_cache else None):
                self._keys = await self._read_unchanged()
            self._read_at = now
        except (TemporaryError, TimeoutError) as error:
            if now - self._read_at > self._max_age:
                self._failures += 1
                raise _unavailable() from error
        self._checked_at = self._clock.monotonic()

    async def _read_unchanged(self) -> list[ApiKey]:
        while True:
            changes = self._changes
            found = await self._store.api_keys.all()
            if changes == self._changes:
                return found

    def _invalidate(self) -> None:
        self._changes += 1
        self._checked_at = float("-inf")

    async def list(self) -> list[ApiKey]:
        return await self._store.api_keys.all()


def _unavailable() -> TemporaryError:
    return DatabaseUnavailable("Cannot check API keys: the database does not answer.")
