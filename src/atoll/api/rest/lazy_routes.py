"""
The documented routes, which are built with the first request that needs them.

To import FastAPI and to build a hundred routes takes longer than all else that a start needs. A
server builds them in the background as soon as it listens; most embedded programs never need them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.metrics_sources import MetricsSources
    from atoll.api.rest.services import Services


class LazyRoutes:
    def __init__(self, services: Services, metrics: MetricsSources) -> None:
        self._services = services
        self._metrics = metrics
        self._app: ASGIApp | None = None
        self._building = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            await self.build()
        assert self._app is not None
        await self._app(scope, receive, send)

    async def build(self) -> None:
        async with self._building:
            if self._app is None:
                # In a thread: other requests are served meanwhile.
                self._app = await asyncio.to_thread(self._build)

    def _build(self) -> ASGIApp:
        from atoll.api.rest import documented_routes

        return documented_routes.build(self._services, self._metrics)
