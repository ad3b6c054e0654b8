"""
HTTP to an application in the same process, without a socket.

Bodies stream both ways, one chunk at a time: an application that writes faster than its client
reads waits. A client that closes early is a disconnect, as it is on a socket: `receive` says so,
what is sent is dropped, and the application finishes by itself, until the transport is closed.
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
        self._unsent: AsyncIterator[bytes] | None = aiter(request.stream)
        self._timeout: float | None = request.extensions.get("timeout", {}).get("read")
        self._left = asyncio.Event()
        self._chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._complete = False
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.Future()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - what a server would log; the client sees a cut
            self._failure = error
        finally:
            if not self.head.done():
                self.head.set_exception(self._cut())
                self.head.exception()
            elif not self._complete:
                self._chunks.put_nowait((b"", True))

    async def within(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise httpx.ReadTimeout("no answer in time", request=self._request) from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            chunk, more = await self.within(self._chunks.get())
            self._chunks.task_done()
            if chunk:
                yield chunk
            elif more:
                raise self._cut()

    async def aclose(self) -> None:
        self._left.set()
        # A `send` that waits for its chunk to be taken must be let go.
        while not self._chunks.empty():
            self._chunks.get_nowait()
            self._chunks.task_done()

    async def _receive(self) -> Message:
        if self._unsent is not None and not self._left.is_set():
            try:
                async for chunk in self._unsent:
                    if chunk:
                        return {"type": "http.request", "body": chunk, "more_body": True}
            except Exception as error:  # noqa: BLE001 - it is raised to the client, whose body it is
                self._unsent = None
                self._left.set()
                if not self.head.done():
                    self.head.set_exception(error)
                return {"type": "http.disconnect"}
            self._unsent = None
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._left.is_set():
            # Dropped, as a server drops it; but a writer that never looks must not stop the loop.
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

    def _cut(self) -> httpx.RemoteProtocolError:
        error = httpx.RemoteProtocolError(
            "the application ended before its answer did", request=self._request
        )
        error.__cause__ = self._failure
        return error

    def _scope(self) -> Message:
        url = self._request.url
        return {
            "type": "http",
            # Up to 2.3 an application looks out for the disconnect even while it sends nothing.
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
