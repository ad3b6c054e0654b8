"""
Requests to an application in the same process, without a socket.

Bodies are streamed one chunk at a time, so a fast writer waits for a slow reader. If the client
closes a response early, the application receives a disconnect as from a real server: further output
is dropped, and the application may finish until the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from atoll.sdk.connection import ServerUnreachable, server_timeout
from atoll.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping

    Message = MutableMapping[str, Any]
    ASGIApp = Callable[
        [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
        Awaitable[None],
    ]

T = TypeVar("T")

_CLOSE_GRACE = 1.0
_HEADERS = {
    "host": "embedded",
    "accept": "*/*",
    "user-agent": f"atoll-python/{__version__}",
}


class InProcessConnection:
    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name
        self._running: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        content: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: float,
    ) -> AsyncIterator[_Exchange]:
        exchange = _Exchange(_scope(method, target, content, headers), content, timeout)
        task = asyncio.create_task(exchange.run(self._app))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await exchange.wait_for_head()
            yield exchange
        except _NoResponseInTime:
            raise server_timeout(self._name, method, target, timeout) from None
        except _ConnectionLost as error:
            lost = ServerUnreachable(f"{self._name} failed: {error}.")
            raise lost from error.__cause__
        finally:
            exchange.close()

    async def close(self) -> None:
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_CLOSE_GRACE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class _NoResponseInTime(Exception):
    pass


class _ConnectionLost(Exception):
    def __init__(self) -> None:
        super().__init__("the application ended before its response was complete")


class _Exchange:
    """One request and its response."""

    def __init__(
        self, scope: Message, content: bytes | AsyncIterable[bytes] | None, timeout: float
    ) -> None:
        self._scope = scope
        self._request_body: AsyncIterator[bytes] | None = aiter(_pieces(content))
        self._timeout = timeout
        self._closed = asyncio.Event()
        self._chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._complete = False
        self._head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.Future()
        self.status_code = 0
        self.headers: dict[str, str] = {}

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    async def aread(self) -> bytes:
        return b"".join([chunk async for chunk in self.aiter_raw()])

    async def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        # Chunks are as large as the application made them: merging them would save nothing.
        more = True
        while more:
            chunk, more = await self._within_timeout(self._chunks.get())
            self._chunks.task_done()
            if chunk:
                yield chunk
            elif more:
                raise self._connection_lost()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - the client sees a lost connection
            self._failure = error
        finally:
            if not self._head.done():
                self._head.set_exception(self._connection_lost())
                self._head.exception()
            elif not self._complete:
                self._chunks.put_nowait((b"", True))

    async def wait_for_head(self) -> None:
        self.status_code, headers = await self._within_timeout(asyncio.shield(self._head))
        for raw_name, raw_value in headers:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value

    def close(self) -> None:
        self._closed.set()
        # Release a `send` that waits for its chunk to be read.
        while not self._chunks.empty():
            self._chunks.get_nowait()
            self._chunks.task_done()

    async def _within_timeout(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise _NoResponseInTime from None

    async def _receive(self) -> Message:
        if self._request_body is not None and not self._closed.is_set():
            try:
                async for chunk in self._request_body:
                    if chunk:
                        return {"type": "http.request", "body": chunk, "more_body": True}
            except Exception as error:  # noqa: BLE001 - the client receives it
                self._request_body = None
                self._closed.set()
                if not self._head.done():
                    self._head.set_exception(error)
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
            self._head.set_result((message["status"], list(message.get("headers", ()))))
        elif message["type"] == "http.response.body":
            more = bool(message.get("more_body", False))
            chunk = b"" if self._scope["method"] == "HEAD" else bytes(message.get("body", b""))
            self._complete = not more
            if chunk or not more:
                self._chunks.put_nowait((chunk, more))
            if more:
                await self._chunks.join()

    def _connection_lost(self) -> _ConnectionLost:
        error = _ConnectionLost()
        error.__cause__ = self._failure
        return error


async def _pieces(content: bytes | AsyncIterable[bytes] | None) -> AsyncIterator[bytes]:
    if isinstance(content, AsyncIterable):
        async for piece in content:
            yield piece
    elif content:
        yield content


def _scope(
    method: str,
    target: str,
    content: bytes | AsyncIterable[bytes] | None,
    headers: Mapping[str, str],
) -> Message:
    path, _, query = target.partition("?")
    path = f"/api/v1/{path}"
    framing = {}
    if isinstance(content, AsyncIterable):
        framing["transfer-encoding"] = "chunked"
    elif content is not None or method in ("POST", "PUT", "PATCH"):
        framing["content-length"] = str(len(content or b""))
    sent = {**_HEADERS, **framing, **{name.lower(): value for name, value in headers.items()}}
    return {
        "type": "http",
        # With 2.3 or lower, frameworks listen for the disconnect while they send nothing.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "server": ("embedded", 80),
        "client": ("127.0.0.1", 0),
        "state": {},
    }
