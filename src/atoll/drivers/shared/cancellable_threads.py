"""Blocking work in threads that can be told to stop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


async def run_until_abandoned(work: Callable[[threading.Event], Result]) -> Result:
    """
    Run `work` in a thread. A cancellation sets the event and then waits for the thread to end, so
    that a next call does not run beside it.
    """
    abandoned = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, abandoned))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        abandoned.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise
