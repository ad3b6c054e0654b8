"""
Flow control of a link: what an executor may send, counted on this side.

Bytes need credit that this side has granted. Frames that need no credit have a rate or a bound of
their own. An executor that exceeds one of these limits violates the protocol.
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
"""Memory of an item besides its bytes."""
MAX_WAITING = 32 * 1024 * 1024
"""Bytes of one stream that its reader has not taken; events are not bounded by the window."""
LATE_ROOM = 64 * 1024
"""Bytes of frames on ended streams; they are discarded."""
RESET_ROOM = frames.WINDOW + 1024 * 1024
"""Bytes in flight on a stream when this side resets it: a window, and the answer."""
MAX_LATE_ROOM = 64 * 1024 * 1024


class Window:
    """The executor's remaining credit on a stream."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        self.room = frames.WINDOW

    def take(self, size: int) -> None:
        # With any credit left the executor may send one more piece; pieces are bounded as well.
        if self.room <= 0:
            raise ProtocolViolation("The executor sent data without credit.")
        self.room -= size

    def grant(self, size: int) -> None:
        self.room += size


class Rate:
    """Limits frames that need no credit: a burst, and a number per second after that."""

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
    """What was received on a stream and waits for its reader; None is the end."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[Item | None, int]] = asyncio.Queue()
        self.waiting = 0
        """Bytes, including the memory of the items themselves."""

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


class LateFrames:
    """
    Frames of streams that have ended. What was in flight when this side reset a stream may still
    arrive. After its own end of a stream an executor has little room for more.
    """

    def __init__(self) -> None:
        self._room = LATE_ROOM

    def add_room(self) -> None:
        self._room = min(self._room + RESET_ROOM, MAX_LATE_ROOM)

    def count(self, size: int) -> None:
        self._room -= size + frames.HEADER.size
        if self._room < 0:
            raise ProtocolViolation("The executor continues to send on streams that have ended.")
