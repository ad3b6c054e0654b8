"""
Work queue of the reconcilers.

A key is queued once however often it is added, and is never with two workers at a time, so a worker
may read the complete state of its key without locking. A key that is added while a worker has it is
queued again afterwards. Order between keys is not guaranteed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict


class Queue:
    def __init__(self) -> None:
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._taken: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, key: str, *, after: float = 0.0) -> None:
        """Queue the key after so many seconds, or earlier if an earlier time is set already."""
        if after > 0:
            loop = asyncio.get_running_loop()
            old = self._timers.get(key)
            if old is not None and old.when() <= loop.time() + after:
                return
            self._drop_timer(key)
            self._timers[key] = loop.call_later(after, self.add, key)
            return
        self._drop_timer(key)
        if key in self._taken:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._filled.set()

    async def take(self) -> str:
        """The next key, which only this caller has until it calls `done`."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        key, _ = self._waiting.popitem(last=False)
        self._taken.add(key)
        return key

    def done(self, key: str) -> None:
        self._taken.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        for key in list(self._timers):
            self._drop_timer(key)

    def _drop_timer(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
