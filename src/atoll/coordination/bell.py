"""Waking one who waits: a ring before the wait counts, and several count as one."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, timeout: float) -> bool:
        """Whether it was rung since the last wait that said so; waits so many seconds for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        rung = self._rung.is_set()
        self._rung.clear()
        return rung
