"""
Whether a store that may be away is there.

After a failure it is not asked again for `retry_after`, so that not every call waits for a
time-out; then one call tries it. A store that answers and refuses is not away, unless it refuses
everything, which `probe` finds out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import structlog

from atoll.blobs.base import Refused, UnlistableNames
from atoll.errors import BlobsUnavailable, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.settings import BlobSettings

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Reach:
    def __init__(self, remote: Blobs, probed: str, settings: BlobSettings, clock: Clock) -> None:
        self._remote = remote
        self._probed = probed
        self._clock = clock
        self.retry_after = settings.retry_after.total_seconds()
        # As long as one call at a store that does not answer can take.
        self._trial = 2 * settings.timeout.total_seconds()
        self._until = 0.0
        self.away: str | None = None
        """Why the store failed last, until it answers again."""
        self.suspect = False
        """Whether it has refused something since it was probed."""
        self.news = asyncio.Event()
        """Set when there may be something to do for who moves what waits."""

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        now = self._clock.monotonic()
        if self.away is not None:
            if now < self._until:
                raise self.unavailable(self.away)
            # This one tries; the others go on not to wait.
            self._until = now + self._trial
        try:
            result = await call()
        except TemporaryError as error:
            if isinstance(error, BlobsUnavailable) and not isinstance(error, Refused):
                self._failed(error)
            else:
                # The store answers. The probe finds out whether it does so to other requests.
                self._until = self._clock.monotonic()
                self.suspect = self.suspect or isinstance(error, Refused)
                self.news.set()
            raise
        except BaseException:
            self._until = self._clock.monotonic()
            raise
        self.answered()
        return result

    async def probe(self) -> bool:
        """Ask it for next to nothing, however it was the last time; whether it answers."""
        self.suspect = False
        try:
            await self._remote.list(self._probed, limit=1)
        except UnlistableNames:
            pass  # That is an answer: somebody else's names are no reason to do without the store.
        except TemporaryError as error:
            self._failed(error)
            return False
        self.answered()
        return True

    def answered(self) -> None:
        if self.away is not None:
            log.info("blobs.back")
            self.news.set()
        self.away = None

    def unavailable(self, why: str) -> TemporaryError:
        return BlobsUnavailable(f"The blob store is away: {why}", retry_after=self.retry_after)

    def _failed(self, error: TemporaryError) -> None:
        if self.away is None:
            log.warning("blobs.away", error=error.message)
            self.news.set()
        self.away = error.message
        self._until = self._clock.monotonic() + self.retry_after
