"""
The embedded server. This is the only module of the client that imports the application.

One task opens and closes the application, because task groups and cancel scopes must not move
between tasks.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from atoll.sdk.in_process_connection import ASGIApp


def application(settings: dict[str, Any]) -> AbstractAsyncContextManager[ASGIApp]:
    # Imported late: clients of a remote server do not need it.
    from atoll.app.embedded import embedded

    return embedded(**settings)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For the start: imports make many objects and little garbage, and visiting them takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class EmbeddedServer:
    def __init__(self, application: AbstractAsyncContextManager[ASGIApp]) -> None:
        self._application = application
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> ASGIApp:
        ready: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        try:
            waited: set[asyncio.Future[Any]] = {self._task, ready}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise
        if not ready.done():
            await self._task  # Raises the error of a failed start.
        return await ready

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def _serve(self, ready: asyncio.Future[ASGIApp]) -> None:
        async with self._application as app:
            ready.set_result(app)
            await self._stopping.wait()
