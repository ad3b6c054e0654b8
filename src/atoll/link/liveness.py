"""
Detects an executor that does not answer any more.

An executor that runs something sends a frame every few seconds. Counted in checks and not in time,
because this process may have been suspended itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from datetime import timedelta

CHECKS = 5
"""Checks within the time after which a silent executor counts as lost."""


class Liveness:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, lost_after: timedelta, lost: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._interval = lost_after.total_seconds() / CHECKS
        self._lost = lost
        self._followers = 0
        self._received = False
        """Whether anything was received since the last check."""
        self._timer: asyncio.TimerHandle | None = None

    def received(self) -> None:
        self._received = True

    def follow(self) -> None:
        """Expect frames until `unfollow`: a run is being followed."""
        self._followers += 1
        if self._timer is None:
            self._schedule(silent=0)

    def unfollow(self) -> None:
        self._followers -= 1

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, silent: int) -> None:
        self._timer = self._loop.call_later(self._interval, self._check, silent)

    def _check(self, silent: int) -> None:
        self._timer = None
        silent = 0 if self._received else silent + 1
        self._received = False
        if not self._followers:
            return
        if silent < CHECKS:
            self._schedule(silent)
        else:
            self._lost()
