"""
The workers of a queue.

A worker takes a key, calls the handler, and adds the key again if the handler returns a delay. A
failure is logged and does not affect other keys; the sweep adds the key again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.reconcile.queue import Queue

log = structlog.get_logger(__name__)


async def work(
    queue: Queue, handle: Callable[[str], Awaitable[float | None]], *, workers: int
) -> None:
    """`handle` returns after how many seconds its key is due again, or None."""
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(_worker(queue, handle), name=f"worker {number}")
    finally:
        queue.close()


async def _worker(queue: Queue, handle: Callable[[str], Awaitable[float | None]]) -> None:
    while True:
        key = await queue.take()
        again = None
        try:
            again = await handle(key)
        except AtollError as error:
            # Expected, and recorded with its subject.
            log.info("reconcile.failed", key=key, code=error.code, error=error.message)
        except Exception as error:
            log.error("reconcile.failed", key=key, exc_info=error)
        finally:
            queue.done(key)
        raise_if_cancelled()
        if again is not None:
            queue.add(key, after=again)


def raise_if_cancelled() -> None:
    """
    End a loop that survives errors if its task was cancelled. An error in a `finally`, such as an
    unavailable back-end, replaces the `CancelledError`, which is not raised again: without this
    check the loop would continue, and a shutdown would wait for it forever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
