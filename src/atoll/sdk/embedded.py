"""
The server inside this process; the one place where the client reaches the application.

The application is opened and closed by one task of its own, whichever tasks ask for it: what it
holds open (task groups, cancel scopes) must not move between tasks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from atoll.sdk.asgi_transport import ASGIApp


def application(settings: dict[str, Any]) -> AbstractAsyncContextManager[ASGIApp]:
    # Late: a client of another server must not pay for loading one.
    from atoll.app.embedded import embedded

    return embedded(**settings)


class EmbeddedServer:
    def __init__(self, application: AbstractAsyncContextManager[ASGIApp]) -> None:
        self._application = application
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> ASGIApp:
        ready: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            waited: set[asyncio.Future[Any]] = {self._task, ready}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise
        if not ready.done():
            await self._task  # raises what kept it from starting
        return await ready

    async def stop(self) -> None:
        self._leave.set()
        if self._task is not None:
            await self._task

    async def _live(self, ready: asyncio.Future[ASGIApp]) -> None:
        async with self._application as app:
            ready.set_result(app)
            await self._leave.wait()
