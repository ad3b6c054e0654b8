"""
Ends an instance that no control plane is connected to any more.

A server may be killed and never restarted, and its data directory may be removed. Its instances
would then run forever. So the executor measures the time without a connection, and exits when the
limit is reached. The session keeps its files: a server that returns later starts a new instance.

Time during which the instance was frozen, or the machine suspended, does not count.
"""

from __future__ import annotations

import time

from .event_loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .connection import Stream
    from .event_loop import Timer

TICK = 60.0
"""Seconds between two checks of the clock at most, so that a pause in between is noticed."""


class Unattended:
    def __init__(
        self,
        loop: Loop,
        limit: float,
        leave: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit` is the time in seconds for an instance without a session."""
        self._loop = loop
        self._monotonic = monotonic
        self._limit = limit
        self._grace = limit
        self._ends_at: float | None = None
        """When the session ends, by the monotonic clock; None without a session."""
        self._leave = leave
        self._allowed = 0.0
        self._waited = 0.0
        self._looked = 0.0
        self._timer: Timer | None = None

    def configure(self, stream: Stream, request: dict[str, Any]) -> None:
        """The request `unattended`, which has no answer."""
        stream.connection.close_stream(stream.number)
        self._limit = float(request["limit"])
        self._grace = float(request["grace"])
        self._ends_at = self._monotonic() + float(request["ends_in"])

    def connected(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def disconnected(self) -> None:
        """Start to measure: the last connection was closed, or none was ever opened."""
        now = self._monotonic()
        self._allowed = self._limit
        if self._ends_at is not None:
            self._allowed = min(self._limit, max(0.0, self._ends_at - now) + self._grace)
        self._waited, self._looked = 0.0, now
        self._look_later()

    def _look_later(self) -> None:
        pause = min(TICK, max(0.0, self._allowed - self._waited))
        self._timer = self._loop.after(pause, lambda: self._look(pause))

    def _look(self, pause: float) -> None:
        now = self._monotonic()
        self._waited += min(now - self._looked, 2 * pause + 1)
        self._looked = now
        if self._waited >= self._allowed:
            self._timer = None
            self._leave()
        else:
            self._look_later()
