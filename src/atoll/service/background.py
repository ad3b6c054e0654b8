"""Tasks that outlive the request that started them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = structlog.get_logger(__name__)


class BackgroundTasks:
    """Keeps references to tasks, logs their errors, and ends them at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, Any], name: str, *, waits: bool = False
    ) -> asyncio.Task[Any]:
        """`waits` marks a task that only waits for others: a shutdown cancels it at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        if waits:
            self._waiting.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._waiting.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AtollError):
            # Expected, and raised where the task is awaited too.
            log.info("task.failed", task=task.get_name(), code=error.code, error=error.message)
        else:
            log.error("task.failed", task=task.get_name(), exc_info=error)

    async def settle(self, timeout: float) -> None:
        """Wait for running tasks for at most `timeout` seconds, then cancel the rest."""
        for task in self._waiting:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
