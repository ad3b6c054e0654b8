"""Work that a cancellation does not interrupt, so that a next call does not run beside it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

Result = TypeVar("Result")


async def run_until_abandoned(work: Callable[[threading.Event], Result]) -> Result:
    """
    Run `work` in a thread. A cancellation sets the event and then waits for the thread to end.
    """
    abandoned = threading.Event()
    return await run_to_end(asyncio.to_thread(work, abandoned), abandoned.set)


async def run_to_end(
    work: Coroutine[Any, Any, Result], on_cancel: Callable[[], None] | None = None
) -> Result:
    """Await `work`; a cancellation waits for its end."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # Retrieved: the cancellation is raised instead.
        raise
