"""
What an executor may send, counted on this side.

It is granted credit for bytes and held to it, and what costs no credit has a rate or a bound of its
own. Whoever exceeds one of them violates the protocol: an executor of ours cannot.
"""

from __future__ import annotations

import asyncio
import time
from typing import Generic, TypeVar

from atoll.link.errors import ProtocolViolation
from atoll.protocol import frames

Item = TypeVar("Item")

EVENT_BURST = 256
EVENTS_PER_SECOND = 100
ITEM_COST = 128
"""What an item takes in memory besides its bytes."""
MAX_WAITING = 32 * 1024 * 1024
"""Bytes of one stream that its reader has not taken. The window bounds data; events have none."""
STRAY_ROOM = 64 * 1024
"""Bytes on streams that have ended, which are dropped unread."""
RESET_ROOM = frames.WINDOW + 1024 * 1024
"""What may be under way on a stream when this side resets it: a window, and the answer."""
MAX_STRAY_ROOM = 64 * 1024 * 1024


class Window:
    """The credit that an executor has left on a stream."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        self.room = frames.WINDOW

    def take(self, size: int) -> None:
        # With any credit left it may complete a piece; pieces have a bound of their own.
        if self.room <= 0:
            raise ProtocolViolation("The executor sent data without credit.")
        self.room -= size

    def grant(self, size: int) -> None:
        self.room += size


class Rate:
    """Bounds frames that cost no credit: so many at once, and so many a second after that."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        self._count = 0
        self._since = time.monotonic()

    def count(self) -> None:
        self._count += 1
        if self._count > EVENT_BURST:
            age = time.monotonic() - self._since
            if self._count > EVENT_BURST + age * EVENTS_PER_SECOND:
                raise ProtocolViolation("The executor sent too many events.")


class Inbox(Generic[Item]):
    """What came on a stream and waits for its reader; None is the end."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[Item | None, int]] = asyncio.Queue()
        self.waiting = 0
        """Bytes, and the cost of the items that they are in."""

    def put(self, item: Item, size: int) -> None:
        cost = size + ITEM_COST
        self.waiting += cost
        if self.waiting > MAX_WAITING:
            raise ProtocolViolation("The executor sent more than a stream may hold.")
        self._items.put_nowait((item, cost))

    def end(self) -> None:
        self._items.put_nowait((None, 0))

    async def get(self) -> Item | None:
        item, cost = await self._items.get()
        self.waiting -= cost
        return item

    def empty(self) -> bool:
        return self._items.empty()


class Strays:
    """
    Frames of streams that have ended. What was under way when this side reset a stream may still
    come; an executor that sends on after its own end of a stream has little room for that.
    """

    def __init__(self) -> None:
        self._room = STRAY_ROOM

    def reset(self) -> None:
        self._room = min(self._room + RESET_ROOM, MAX_STRAY_ROOM)

    def take(self, size: int) -> None:
        self._room -= size + frames.HEADER.size
        if self._room < 0:
            raise ProtocolViolation("The executor sends on streams that have ended.")
