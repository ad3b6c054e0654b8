"""
`/api/v1/executions/{id}/console`: a terminal, or the pipes, of an execution over a WebSocket.

Before the WebSocket is accepted, an error is an HTTP response with a problem document. Afterwards
it is an `error` message, and the connection stays open unless there are too many of them. A client
that does not read is disconnected after a while; it delays neither the execution nor other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from atoll.api.rest.problems import on_unexpected, problem
from atoll.api.ws import messages
from atoll.errors import AtollError, Forbidden, InvalidRequest, NotFound, RequestError
from atoll.service.executions.console import Output, State

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services
    from atoll.service.executions.console import Console

PROTOCOL = "atoll.console"
PATH = re.compile(r"/api/v1/executions/([^/]+)/console")
SEND_TIMEOUT = 30.0
"""Seconds within which a client must read some of its pending data."""
RECHECK_INTERVAL = 5.0
"""Seconds between two checks whether the API key is still valid."""
MAX_INVALID_MESSAGES = 20
"""Invalid messages after which the connection is closed."""
MAX_POSITION = 1 << 62
MAX_PENDING_INPUT = 16
"""Messages of input that the execution has not read yet."""
INPUT_TIMEOUT = 1.0
"""Seconds that a signal or a new size waits for earlier input to be read."""

POLICY = 1008
INTERNAL = 1011
KEY_GONE = 4401
REFUSED = 4400
"""Plus the status minus 400: for servers that cannot refuse a handshake with a document."""


class ConsoleRoute:
    """Serves WebSockets and passes all other requests on."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        with contextlib.suppress(WebSocketDisconnect):
            await self._serve(socket)

    async def _serve(self, socket: WebSocket) -> None:
        try:
            check_origin(socket, self._services.settings.cors_origins)
            match = PATH.fullmatch(socket.scope["path"])
            if match is None:
                raise NotFound(f"{socket.scope['path']} does not accept WebSockets.")
            opened = self._services.consoles.open(
                match[1],
                after=_number(socket, "after"),
                may_type=not socket.scope.get("atoll.read_only", False),
                may_wait=_choice(socket, "mode", ("type", "watch")) == "type",
            )
            as_json = _choice(socket, "format", ("binary", "json")) == "json"
            reservation = self._services.streams.open(socket.scope)
        except AtollError as error:
            await deny(socket, problem(error), error)
            return
        try:
            async with opened as console:
                offered = PROTOCOL in socket.scope.get("subprotocols", ())
                await socket.accept(PROTOCOL if offered else None)
                code, reason = await _ConsoleConnection(
                    socket, console, match[1], as_json=as_json
                ).run()
                with contextlib.suppress(TimeoutError, RuntimeError):
                    async with asyncio.timeout(SEND_TIMEOUT):
                        await socket.close(code, reason)
        except AtollError as error:  # Before it was accepted; afterwards `run` handles errors.
            await deny(socket, problem(error), error)
        except WebSocketDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - logged by on_unexpected
            response = await on_unexpected(socket.scope["path"], error)
            await deny(
                socket,
                response,
                AtollError("Internal error. See the server log.", code="internal_error"),
            )
        finally:
            reservation.close()


def check_origin(socket: WebSocket, allowed: tuple[str, ...]) -> None:
    """Web pages must have this origin or an allowed one; other programs send no origin."""
    origin = socket.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc.lower() != socket.headers.get("host", "").lower() or not origin:
        raise Forbidden(
            "Web pages of this origin may not connect. Add it to ATOLL_CORS_ORIGINS to allow them.",
            code="origin_refused",
        )


def _number(socket: WebSocket, name: str) -> int:
    text = socket.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < MAX_POSITION):
        raise InvalidRequest(f"{name}: must be a position that a console has sent.", field=name)
    return int(text)


def _choice(socket: WebSocket, name: str, words: tuple[str, ...]) -> str:
    word = socket.query_params.get(name, words[0])
    if word not in words:
        raise InvalidRequest(f"{name}: must be one of {', '.join(words)}.", field=name)
    return word


async def deny(socket: WebSocket, response: Response, error: AtollError) -> None:
    # The client may have left, or the WebSocket may be closed already.
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        if "websocket.http.response" in socket.scope.get("extensions", {}):
            await socket.send_denial_response(response)
        else:
            await socket.accept()
            code = REFUSED + response.status_code - 400
            await socket.close(code, f"{error.code}: {error.message}"[:120])


class _ConsoleConnection:
    """One WebSocket from its acceptance to its close."""

    def __init__(
        self, socket: WebSocket, console: Console, execution_id: str, *, as_json: bool
    ) -> None:
        self._socket = socket
        self._console = console
        self._execution_id = execution_id
        self._as_json = as_json
        self._input: asyncio.Queue[messages.Stdin] = asyncio.Queue(MAX_PENDING_INPUT)
        self._invalid_messages = 0

    async def run(self) -> tuple[int, str]:
        """The code to close with, and why."""
        work = [
            asyncio.create_task(part())
            for part in (self._send_events, self._receive, self._write_input, self._recheck_key)
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        except (TimeoutError, WebSocketDisconnect, OSError):
            return POLICY, "the client does not read"
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _send(self, content: bytes | str) -> None:
        async with asyncio.timeout(SEND_TIMEOUT):
            if isinstance(content, bytes):
                await self._socket.send_bytes(content)
            else:
                await self._socket.send_text(content)

    async def _send_events(self) -> tuple[int, str]:
        """Send output and states until the execution ends."""
        terminal = self._console.terminal
        try:
            async for event in self._console.events():
                if isinstance(event, Output):
                    for message in messages.output(event, as_json=self._as_json):
                        await self._send(message)
                elif isinstance(event, State):
                    await self._send(messages.status(event, self._execution_id, terminal=terminal))
                else:
                    await self._send(messages.exit_(event))
        except AtollError as error:
            await self._send(messages.error(error))
            return INTERNAL, error.code
        return 1000, ""

    async def _receive(self) -> tuple[int, str]:
        """Handle the client's messages until it leaves."""
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1005))
            data = received.get("bytes")
            try:
                message = messages.parse(received["text"] if data is None else data)
            except AtollError as error:
                await self._send(messages.error(error))
                self._invalid_messages += 1
                if self._invalid_messages >= MAX_INVALID_MESSAGES:
                    return POLICY, "too many invalid messages"
                continue
            try:
                if isinstance(message, messages.Stdin):
                    await self._input.put(message)
                    continue
                await self._after_input()
                if isinstance(message, messages.Resize):
                    await self._console.resize(message.rows, message.cols)
                elif isinstance(message, messages.Signal):
                    await self._console.signal(message.number)
                elif message.end:
                    await self._console.end()
                else:
                    return 1000, "detached"
            except AtollError as error:
                await self._send(messages.error(error))

    async def _after_input(self) -> None:
        """Wait for earlier input, but not long: if it is not read, a signal may be what helps."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INPUT_TIMEOUT):
                await self._input.join()

    async def _write_input(self) -> tuple[int, str]:
        """Write input to the execution, in order."""
        while True:
            message = await self._input.get()
            try:
                await self._console.type(message.data, eof=message.eof)
            except AtollError as error:
                await self._send(messages.error(error))
            self._input.task_done()

    async def _recheck_key(self) -> tuple[int, str]:
        recheck = self._socket.scope.get("atoll.recheck")
        while True:
            await asyncio.sleep(RECHECK_INTERVAL)
            if recheck is not None:
                try:
                    await recheck()
                except RequestError as error:
                    return KEY_GONE, error.code
                except AtollError:
                    continue  # The database is unavailable; the key was valid before.
