"""
What clients may use of a server at the same time: requests, streams, and memory for responses.

Each limit is for the process, and one API key gets at most half of it, so that a client that opens
many and reads none does not lock out the others.
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
    """The id of the caller's API key; all callers without one, as with signed links, share one."""
    return str(scope.get(KEY, ""))


class Quota:
    """An amount for all keys together, half of which one key may use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._per_key = max(1, limit // 2)
        self._by_key: Counter[str] = Counter()
        self.used = 0

    def fits(self, key: str, amount: int) -> bool:
        """Whether it is free. More than a key's share fits if the key uses nothing else."""
        used_by_key = self._by_key[key]
        if amount > self._per_key:
            return used_by_key == 0 and (self.used + amount <= self.limit or self.used == 0)
        return used_by_key + amount <= self._per_key and self.used + amount <= self.limit

    def take(self, key: str, amount: int) -> None:
        self._by_key[key] += amount
        self.used += amount

    def give_back(self, key: str, amount: int) -> None:
        self._by_key[key] -= amount
        if not self._by_key[key]:
            del self._by_key[key]
        self.used -= amount


class Reservation:
    """A part of a quota; given back once, however often it is closed."""

    def __init__(self, quota: Quota, key: str, amount: int) -> None:
        self._quota: Quota | None = quota
        self._key = key
        self._amount = amount
        quota.take(key, amount)

    def close(self) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.give_back(self._key, self._amount)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ResponseMemory:
    """The memory of large responses that clients have not read yet, in bytes."""

    def __init__(self, limit: int) -> None:
        self._quota = Quota(limit)
        self._freed = asyncio.Event()

    def try_reserve(self, key: str, size: int) -> Reservation | None:
        return _MemoryReservation(self, key, size) if self._quota.fits(key, size) else None

    def reserve(self, key: str, size: int) -> Reservation:
        reservation = self.try_reserve(key, size)
        if reservation is None:
            raise out_of_memory()
        return reservation

    async def wait_to_reserve(self, key: str, size: int) -> Reservation:
        while (reservation := self.try_reserve(key, size)) is None:
            self._freed.clear()
            await self._freed.wait()
        return reservation


class _MemoryReservation(Reservation):
    def __init__(self, memory: ResponseMemory, key: str, amount: int) -> None:
        super().__init__(memory._quota, key, amount)
        self._freed = memory._freed

    def close(self) -> None:
        super().close()
        self._freed.set()


class StreamLimit:
    """Bounds the open event streams and consoles."""

    def __init__(self, limit: int) -> None:
        self._quota = Quota(limit)

    def open(self, scope: Scope) -> Reservation:
        key = key_of(scope)
        if not self._quota.fits(key, 1):
            raise TemporaryError(
                "Too many event streams and consoles are open, for this API key or in total. Close "
                "some of them or retry later.",
                code="too_many_streams",
                retry_after=10.0,
            )
        return Reservation(self._quota, key, 1)


class RequestLimit:
    """Bounds the unfinished requests of one API key, waiting ones included."""

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


def out_of_memory() -> TemporaryError:
    return TemporaryError(
        "Too many large responses have not been read yet, for this API key or in total. Read the "
        "open ones, then retry.",
        code="too_many_large_answers",
        retry_after=2.0,
    )


def _too_many_requests() -> TemporaryError:
    return TemporaryError(
        "Too many requests with this API key are in progress. Wait for some of them to finish.",
        code="too_many_requests",
        retry_after=2.0,
    )
