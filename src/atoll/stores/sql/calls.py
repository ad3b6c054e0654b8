"""
Calls from the event loop to a database thread, and the way of their answers back.

The loop is woken once for all answers that are there when it gets to look, not once for each. An
answer whose caller was cancelled meanwhile is dropped; its operation has run all the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from atoll.stores.sql.engine import Operation


@dataclass(slots=True, eq=False)
class Call:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None


class Answers:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._announced = False

    def put(self, calls: Iterable[Call]) -> None:
        """Called by the database threads."""
        self._calls.extend(calls)
        if not self._announced:
            self._announced = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before the first look: what a thread puts later must be announced again.
        self._announced = False
        while self._calls:
            call = self._calls.popleft()
            if call.future.done():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.value)
