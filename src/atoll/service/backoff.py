"""Growing pauses between attempts while a back-end is unavailable."""

from __future__ import annotations

import asyncio

PAUSES = (1.0, 2.0, 4.0, 10.0)
"""Seconds; the last one repeats."""


class Backoff:
    def __init__(self) -> None:
        self._count = 0

    async def pause(self) -> None:
        seconds = PAUSES[min(self._count, len(PAUSES) - 1)]
        self._count += 1
        await asyncio.sleep(seconds)
