"""
Circuit breaker for a remote store.

After a failure, calls fail at once for `retry_after` instead of each waiting for a time-out; then
one call tries the store. A store that answers but refuses is available, unless it refuses
everything, which `probe` finds out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import structlog

from atoll.blobs.base import RefusedByStore, UnlistableNames
from atoll.errors import BlobsUnavailable, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.settings import BlobSettings

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Availability:
    def __init__(self, remote: Blobs, probed: str, settings: BlobSettings, clock: Clock) -> None:
        self._remote = remote
        self._probed = probed
        self._clock = clock
        self.retry_after = settings.retry_after.total_seconds()
        # The longest time that one call to an unresponsive store can take.
        self._trial_time = 2 * settings.timeout.total_seconds()
        self._until = 0.0
        self.away: str | None = None
        """Why the store failed last; None while it is available."""
        self.suspect = False
        """Whether it refused something since the last probe."""
        self.changed = asyncio.Event()
        """Set when the uploader may have something to do."""

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        now = self._clock.monotonic()
        if self.away is not None:
            if now < self._until:
                raise self.unavailable(self.away)
            # This call tries; others keep failing at once.
            self._until = now + self._trial_time
        try:
            result = await operation()
        except TemporaryError as error:
            if isinstance(error, BlobsUnavailable) and not isinstance(error, RefusedByStore):
                self._failed(error)
            else:
                # The store answers. A probe finds out whether it refuses other requests too.
                self._until = self._clock.monotonic()
                self.suspect = self.suspect or isinstance(error, RefusedByStore)
                self.changed.set()
            raise
        except BaseException:
            self._until = self._clock.monotonic()
            raise
        self.answered()
        return result

    async def probe(self) -> bool:
        """Send a cheap request, whatever happened before; true if the store answers."""
        self.suspect = False
        try:
            await self._remote.list(self._probed, limit=1)
        except UnlistableNames:
            pass  # The store answers; it is available.
        except TemporaryError as error:
            self._failed(error)
            return False
        self.answered()
        return True

    def answered(self) -> None:
        if self.away is not None:
            log.info("blobs.back")
            self.changed.set()
        self.away = None

    def unavailable(self, why: str) -> TemporaryError:
        return BlobsUnavailable(
            f"The blob store is unavailable: {why}", retry_after=self.retry_after
        )

    def _failed(self, error: TemporaryError) -> None:
        if self.away is None:
            log.warning("blobs.away", error=error.message)
            self.changed.set()
        self.away = error.message
        self._until = self._clock.monotonic() + self.retry_after
