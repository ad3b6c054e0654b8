"""The HTTP client of tests, on a connection to an application in the same process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx

from atoll.sdk.in_process_connection import InProcessConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.connection import Response
    from atoll.sdk.in_process_connection import ASGIApp


class InProcessTransport(httpx.AsyncBaseTransport):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = AsyncExitStack()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = [(name.lower(), value) for name, value in request.headers.raw]
            scope = {**scope, "path": request.url.path, "headers": headers}
            await self._app(scope, receive, send)

        connection = InProcessConnection(app, "the application")
        self._open.push_async_callback(connection.close)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        exchange = AsyncExitStack()
        response = await exchange.enter_async_context(
            connection.stream(
                request.method,
                f"?{request.url.query.decode()}",
                content=request.stream,
                headers={},
                timeout=request.extensions["timeout"]["read"],
            )
        )
        return httpx.Response(
            response.status_code, headers=dict(response.headers), stream=_Body(response, exchange)
        )

    async def aclose(self) -> None:
        await self._open.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: Response, exchange: AsyncExitStack) -> None:
        self._response = response
        self._exchange = exchange

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._response.aiter_raw()

    async def aclose(self) -> None:
        await self._exchange.aclose()
