"""
Retries while the server is unavailable, and cleanup when the caller is cancelled.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

_UNDO_TIMEOUT = 10.0


class Backoff:
    """Waits between retries while the server is unavailable, for at most `limit` seconds."""

    limit = 30.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The server has responded: start over."""
        self._since: float | None = None
        self._pause = 0.1

    async def wait_or_raise(self, error: AtollError) -> None:
        """Wait before the next try. Raises `error` once the limit is exceeded."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        elif now - self._since > self.limit:
            raise error
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, 2.0)


async def undo_if_cancelled(
    action: Coroutine[None, None, T], undo: Callable[[T], Awaitable[object]]
) -> T:
    """
    Await `action`. If the caller is cancelled meanwhile, it would never learn what to clean up. So
    the action may finish, for a limited time, and is then undone.
    """
    task = asyncio.ensure_future(action)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await best_effort(_undo(task, undo))
        raise


async def _undo(task: asyncio.Future[T], undo: Callable[[T], Awaitable[object]]) -> None:
    await undo(await task)


async def best_effort(cleaning: Awaitable[object]) -> None:
    """Try to clean up. Failures are ignored, because another error is already being raised."""
    with suppress(AtollError, TimeoutError):
        async with asyncio.timeout(_UNDO_TIMEOUT):
            await cleaning
