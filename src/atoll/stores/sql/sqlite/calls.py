"""
Passes calls from the event loop to a database thread, and results back to the loop.

The loop is woken once for all results that have arrived when it runs, not once for each. The result
of a caller that was cancelled is dropped; its operation has run nevertheless.
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

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class ResultQueue:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._scheduled = False

    def put(self, calls: Iterable[Call]) -> None:
        """Called by the database threads."""
        self._calls.extend(calls)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before the loop: results that a thread puts from here on need another callback.
        self._scheduled = False
        while self._calls:
            self._calls.popleft().deliver()
