"""
HTTP to an application in the same process, without a socket.

Bodies are streamed one chunk at a time, so a fast writer waits for a slow reader. If the client
closes a response early, the application receives a disconnect as from a real server: further output
is dropped, and the application may finish until the transport is closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    ASGIApp = Callable[
        [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
        Awaitable[None],
    ]

_CLOSE_GRACE = 1.0


class InProcessTransport(httpx.AsyncBaseTransport):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _Exchange(request)
        task = asyncio.create_task(exchange.run(self._app))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            status, headers = await exchange.within(asyncio.shield(exchange.head))
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)

    async def aclose(self) -> None:
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_CLOSE_GRACE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class _Exchange(httpx.AsyncByteStream):
    """One request and its response, which is also the response's body."""

    def __init__(self, request: httpx.Request) -> None:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        self._request = request
        self._request_body: AsyncIterator[bytes] | None = aiter(request.stream)
        self._timeout: float | None = request.extensions.get("timeout", {}).get("read")
        self._closed = asyncio.Event()
        self._chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._complete = False
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.Future()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - the client sees a lost connection
            self._failure = error
        finally:
            if not self.head.done():
                self.head.set_exception(self._connection_lost())
                self.head.exception()
            elif not self._complete:
                self._chunks.put_nowait((b"", True))

    async def within(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise httpx.ReadTimeout("no response in time", request=self._request) from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            chunk, more = await self.within(self._chunks.get())
            self._chunks.task_done()
            if chunk:
                yield chunk
            elif more:
                raise self._connection_lost()

    async def aclose(self) -> None:
        self._closed.set()
        # Release a `send` that waits for its chunk to be read.
        while not self._chunks.empty():
            self._chunks.get_nowait()
            self._chunks.task_done()

    async def _receive(self) -> Message:
        if self._request_body is not None and not self._closed.is_set():
            try:
                async for chunk in self._request_body:
                    if chunk:
                        return {"type": "http.request", "body": chunk, "more_body": True}
            except Exception as error:  # noqa: BLE001 - the client receives it
                self._request_body = None
                self._closed.set()
                if not self.head.done():
                    self.head.set_exception(error)
                return {"type": "http.disconnect"}
            self._request_body = None
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._closed.is_set():
            # Yield to the loop, in case the application never checks for the disconnect.
            await asyncio.sleep(0)
            return
        if message["type"] == "http.response.start":
            self.head.set_result((message["status"], list(message.get("headers", ()))))
        elif message["type"] == "http.response.body":
            more = bool(message.get("more_body", False))
            chunk = b"" if self._request.method == "HEAD" else bytes(message.get("body", b""))
            self._complete = not more
            if chunk or not more:
                self._chunks.put_nowait((chunk, more))
            if more:
                await self._chunks.join()

    def _connection_lost(self) -> httpx.RemoteProtocolError:
        error = httpx.RemoteProtocolError(
            "the application ended before its response was complete", request=self._request
        )
        error.__cause__ = self._failure
        return error

    def _scope(self) -> Message:
        url = self._request.url
        return {
            "type": "http",
            # With 2.3 or lower, frameworks listen for the disconnect while they send nothing.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "server": (url.host, url.port or 80),
            "client": ("127.0.0.1", 0),
            "state": {},
        }
