"""
Work that goes on behind the request that started it: held, its errors logged, ended at shutdown.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = structlog.get_logger(__name__)


class BackgroundTasks:
    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, Any], name: str, *, waits: bool = False
    ) -> asyncio.Task[Any]:
        """With `waits` it does nothing but wait for others, and a shutdown does not wait for it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        if waits:
            self._waiting.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        self._waiting.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AtollError):
            # Foreseen, and raised to whoever waits for it as well.
            log.info("task.failed", task=task.get_name(), code=error.code, error=error.message)
        else:
            log.error("task.failed", task=task.get_name(), exc_info=error)

    async def settle(self, timeout: float) -> None:
        """Wait for what is under way, at most so many seconds, then cancel what is left."""
        for task in self._waiting:
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout)
        left = set(self._background)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
