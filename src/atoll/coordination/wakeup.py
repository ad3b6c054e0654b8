"""Wakes one waiting task. A wake-up that comes before the wait counts; several count as one."""

from __future__ import annotations

import asyncio
import contextlib


class WakeUp:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, timeout: float) -> bool:
        """
        Wait at most `timeout` seconds; true if `wake` was called since the last wait that
        returned true.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        woken = self._event.is_set()
        self._event.clear()
        return woken
