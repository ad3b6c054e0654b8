"""
WebSockets to a server, or to an application in the same process.

If a connection cannot be opened, raises the error that the server returned, or a `TemporaryError`
as for other requests. `Closed` reports the end of an open connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode, urlsplit

from atoll.errors import AtollError, TemporaryError
from atoll.sdk.error_response import error_from_response
from atoll.sdk.tls_errors import tls_error, unreachable_message, wrong_scheme_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.sdk.endpoint import Endpoint
    from atoll.sdk.in_process_connection import ASGIApp, Message

MAX_MESSAGE = 1 << 20
"""Bytes of one message from the server."""
_PING_INTERVAL = 20.0
_CLOSE_TIMEOUT = 2.0
_MAX_QUEUED = 16
GONE = 1006
"""Close code of a lost connection."""


class Closed(Exception):
    """The connection has ended; `code` is a WebSocket close code."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".strip())
        self.code = code
        self.reason = reason


class Socket(Protocol):
    async def send(self, message: bytes | str) -> None: ...
    async def receive(self) -> bytes | str: ...
    async def close(self) -> None: ...


async def connect(
    endpoint: Endpoint, path: str, query: Mapping[str, str], timeout: float, app: ASGIApp | None
) -> Socket:
    """`app` is the application of an embedded server."""
    path = f"/api/v1/{path}"
    if app is not None:
        return await InProcessSocket.open(app, path, urlencode(query), timeout)
    return await _connect(endpoint, f"{path}?{urlencode(query)}", timeout)


async def _connect(endpoint: Endpoint, path: str, timeout: float) -> Socket:
    # Imported late: most programs never open a WebSocket.
    from websockets.asyncio.client import connect as open_websocket
    from websockets.exceptions import InvalidStatus, WebSocketException

    assert endpoint.url is not None
    parts = urlsplit(endpoint.url)
    options: dict[str, Any] = {}
    if endpoint.loopback:
        options["proxy"] = None
    if parts.scheme == "https":
        import httpx

        options["ssl"] = httpx.create_ssl_context()
    if endpoint.key is not None:
        options["additional_headers"] = {"Authorization": f"Bearer {endpoint.key}"}
    scheme = "wss" if parts.scheme == "https" else "ws"
    try:
        connection = await open_websocket(
            f"{scheme}://{parts.netloc}{parts.path}{path}",
            open_timeout=timeout,
            close_timeout=_CLOSE_TIMEOUT,
            ping_interval=_PING_INTERVAL,
            ping_timeout=_PING_INTERVAL,
            max_size=MAX_MESSAGE,
            compression=None,
            **options,
        )
    except InvalidStatus as error:
        answer = error.response
        headers, body = answer.headers, bytes(answer.body or b"")
        raise (
            wrong_scheme_error(endpoint, answer.status_code, headers, body)
            or error_from_response(answer.status_code, headers, body, endpoint.key_origin)
        ) from None
    except (OSError, TimeoutError, WebSocketException) as error:
        raise (
            await tls_error(endpoint, error, probe=not isinstance(error, OSError))
            or TemporaryError(unreachable_message(endpoint, error), code="server_unreachable")
        ) from None
    return _ServerSocket(connection)


class _ServerSocket:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def send(self, message: bytes | str) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(message)
        except ConnectionClosed:
            raise self._closed() from None

    async def receive(self) -> bytes | str:
        from websockets.exceptions import ConnectionClosed

        try:
            message: bytes | str = await self._connection.recv()
            return message
        except ConnectionClosed:
            raise self._closed() from None

    def _closed(self) -> Closed:
        code = self._connection.close_code
        return Closed(GONE if code is None else code, self._connection.close_reason or "")

    async def close(self) -> None:
        await self._connection.close()


class InProcessSocket:
    """The client side of a WebSocket to an application in this process."""

    def __init__(self) -> None:
        self._to_app: asyncio.Queue[Message] = asyncio.Queue(_MAX_QUEUED)
        self._from_app: asyncio.Queue[bytes | str | Closed] = asyncio.Queue(_MAX_QUEUED)
        self._head: asyncio.Future[AtollError | None] = asyncio.get_running_loop().create_future()
        self._left = False
        self._closed: Closed | None = None
        self._denial: tuple[int, dict[str, str], bytes] = (500, {}, b"")
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, app: ASGIApp, path: str, query: str, timeout: float) -> InProcessSocket:
        socket = cls()
        socket._task = asyncio.create_task(socket._run(app, path, query))
        try:
            async with asyncio.timeout(timeout):
                refusal = await asyncio.shield(socket._head)
        except TimeoutError:
            await socket.close()
            raise TemporaryError(
                f"The embedded server did not answer {path} within {timeout:g} s.",
                code="server_timeout",
            ) from None
        except BaseException:
            await socket.close()
            raise
        if refusal is not None:
            await socket.close()
            raise refusal
        return socket

    async def send(self, message: bytes | str) -> None:
        if self._closed is not None:
            raise self._closed
        key = "bytes" if isinstance(message, bytes) else "text"
        await self._to_app.put({"type": "websocket.receive", key: message})

    async def receive(self) -> bytes | str:
        if self._closed is not None and self._from_app.empty():
            raise self._closed
        message = await self._from_app.get()
        if isinstance(message, Closed):
            self._closed = message
            raise message
        return message

    async def close(self) -> None:
        self._left = True
        self._closed = self._closed or Closed(1000)
        # Both ends may be waiting for a full queue.
        for queue in (self._to_app, self._from_app):
            while not queue.empty():
                queue.get_nowait()
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": 1000})
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, app: ASGIApp, path: str, query: str) -> None:
        self._to_app.put_nowait({"type": "websocket.connect"})
        scope: Message = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"embedded")],
            "subprotocols": [],
            "server": ("embedded", 80),
            "client": ("127.0.0.1", 0),
            "state": {},
            "extensions": {"websocket.http.response": {}},
        }
        try:
            with suppress(Exception):  # A server would log it; the client sees a lost connection.
                await app(scope, self._to_app.get, self._send)
        finally:
            if not self._head.done():
                self._head.set_result(error_from_response(500, {}, b""))
            self._end(Closed(GONE))

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept":
            self._head.set_result(None)
        elif kind == "websocket.send":
            if not self._left:
                text = message.get("text")
                await self._from_app.put(message["bytes"] if text is None else text)
        elif kind == "websocket.close":
            if not self._head.done():
                self._head.set_result(error_from_response(403, {}, b""))
            self._end(Closed(message.get("code", 1000), message.get("reason") or ""))
        elif kind == "websocket.http.response.start":
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self._denial = (message["status"], headers, b"")
        elif kind == "websocket.http.response.body":
            status, headers, body = self._denial
            self._denial = (status, headers, body + message.get("body", b""))
            if not message.get("more_body") and not self._head.done():
                self._head.set_result(error_from_response(*self._denial))

    def _end(self, closed: Closed) -> None:
        if self._closed is None and not self._left:
            with suppress(asyncio.QueueFull):
                self._from_app.put_nowait(closed)
                return
            # The queue is full: report it after the queued messages.
            self._closed = closed
