"""
What to do when a wait is interrupted: by a server that is away, or by the caller.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

_UNDO_TIMEOUT = 10.0


class Backoff:
    """Waits out a server that is being started again, as long as that may take and no longer."""

    limit = 30.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The server answered."""
        self._since: float | None = None
        self._pause = 0.1

    async def wait_or_raise(self, error: AtollError) -> None:
        """Return when it is worth trying again; raises `error` when it was long enough."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        elif now - self._since > self.limit:
            raise error
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, 2.0)


def new_key() -> str:
    """An idempotency key for one request, so that it may be sent again."""
    return secrets.token_hex(16)


async def undo_if_cancelled(
    action: Coroutine[None, None, T], undo: Callable[[T], Awaitable[object]]
) -> T:
    """
    What `action` gives. A caller who is cancelled meanwhile would never learn what to clean up, so
    then the action is let finish, for a while, and is undone.
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
    """Try to clean up; what led here is the error to see."""
    with suppress(AtollError, TimeoutError):
        async with asyncio.timeout(_UNDO_TIMEOUT):
            await cleaning
