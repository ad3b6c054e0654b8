"""
What clients may hold of a server at the same time: requests, streams and memory for answers.

Each bound is for the process, and one key gets at most half of it, so that a client which opens
much and reads nothing does not lock out the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from atoll.api.rest.problems import problem
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "atoll.key"


def key_of(scope: Scope) -> str:
    """The caller's key; one name for all who have none, such as those with a signed link."""
    return str(scope.get(KEY, ""))


class Quota:
    """So much of something for all, and half of it for each key."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._per_key = max(1, limit // 2)
        self._by_key: Counter[str] = Counter()
        self.used = 0

    def fits(self, key: str, amount: int) -> bool:
        """Whether there is room; what is larger than a share fits as the key's only one."""
        mine = self._by_key[key]
        if amount > self._per_key:
            return mine == 0 and (self.used + amount <= self.limit or self.used == 0)
        return mine + amount <= self._per_key and self.used + amount <= self.limit

    def take(self, key: str, amount: int) -> None:
        self._by_key[key] += amount
        self.used += amount

    def give_back(self, key: str, amount: int) -> None:
        self._by_key[key] -= amount
        if not self._by_key[key]:
            del self._by_key[key]
        self.used -= amount


class Reservation:
    """Something taken from a share; given back once, however often it is closed."""

    def __init__(self, share: Quota, key: str, amount: int) -> None:
        self._share: Quota | None = share
        self._key = key
        self._amount = amount
        share.take(key, amount)

    def close(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.give_back(self._key, self._amount)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ResponseMemory:
    """The memory of large answers that clients have not read yet, in bytes."""

    def __init__(self, limit: int) -> None:
        self._share = Quota(limit)
        self._freed = asyncio.Event()

    def try_hold(self, key: str, size: int) -> Reservation | None:
        return _MemoryReservation(self, key, size) if self._share.fits(key, size) else None

    def hold(self, key: str, size: int) -> Reservation:
        held = self.try_hold(key, size)
        if held is None:
            raise no_memory()
        return held

    async def wait_to_hold(self, key: str, size: int) -> Reservation:
        while (held := self.try_hold(key, size)) is None:
            self._freed.clear()
            await self._freed.wait()
        return held


class _MemoryReservation(Reservation):
    def __init__(self, memory: ResponseMemory, key: str, amount: int) -> None:
        super().__init__(memory._share, key, amount)
        self._freed = memory._freed

    def close(self) -> None:
        super().close()
        self._freed.set()


class StreamLimit:
    """Event streams and consoles that are open."""

    def __init__(self, limit: int) -> None:
        self._share = Quota(limit)

    def open(self, scope: Scope) -> Reservation:
        key = key_of(scope)
        if not self._share.fits(key, 1):
            raise TemporaryError(
                "Too many event streams and consoles are open, of this key or in all. Close some, "
                "or try again later.",
                code="too_many_streams",
                retry_after=10.0,
            )
        return Reservation(self._share, key, 1)


class RequestLimit:
    """Bounds the requests of one key that are under way, those that wait included."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get(KEY)
        if key is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._open[key] >= self._limit:
            await problem(_too_many_requests())(scope, receive, send)
            return
        self._open[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


def no_memory() -> TemporaryError:
    return TemporaryError(
        "Too many large answers wait to be read, of this key or in all. Read those that are open, "
        "then try again.",
        code="too_many_large_answers",
        retry_after=2.0,
    )


def _too_many_requests() -> TemporaryError:
    return TemporaryError(
        "Too many requests of this key are under way. Wait for some of them to end.",
        code="too_many_requests",
        retry_after=2.0,
    )
