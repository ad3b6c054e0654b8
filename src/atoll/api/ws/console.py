"""
`/api/v1/executions/{id}/console`: a terminal, or the pipes, of an execution over a WebSocket.

What is wrong before the connection stands is an HTTP answer with a problem document; after that, an
`error` message, and the connection goes on, unless there were too many. A client that does not read
is left after a while; it holds up neither the execution nor those who watch beside it.
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
SEND_SECONDS = 30.0
"""How long a client may take none of what waits for it."""
RECHECK_SECONDS = 5.0
"""How often it is asked whether the key is still one."""
MAX_BAD = 20
"""Messages that are not understood before the connection is closed."""
MAX_POSITION = 1 << 62
WAITING_INPUT = 16
"""Messages of input that wait for the execution to take them."""
OVERTAKE_SECONDS = 1.0
"""How long a signal or a size waits for the input that came before it."""

POLICY = 1008
INTERNAL = 1011
KEY_GONE = 4401
REFUSED = 4400
"""Where a server cannot answer a handshake with a document: plus what the status is above 400."""


class ConsoleRoute:
    """Answers WebSockets, and leaves the rest to the application behind it."""

    def __init__(self, app: ASGIApp, found: Services) -> None:
        self._app = app
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        with contextlib.suppress(WebSocketDisconnect):
            await self._serve(socket)

    async def _serve(self, socket: WebSocket) -> None:
        try:
            check_origin(socket, self._found.settings.cors_origins)
            found = PATH.fullmatch(socket.scope["path"])
            if found is None:
                raise NotFound(f"There is no WebSocket at {socket.scope['path']}.")
            opened = self._found.consoles.open(
                found[1],
                after=_number(socket, "after"),
                may_type=not socket.scope.get("atoll.read_only", False),
                in_line=_choice(socket, "mode", ("type", "watch")) == "type",
            )
            as_json = _choice(socket, "format", ("binary", "json")) == "json"
            held = self._found.streams.open(socket.scope)
        except AtollError as error:
            await deny(socket, problem(error), error)
            return
        try:
            async with opened as console:
                offered = PROTOCOL in socket.scope.get("subprotocols", ())
                await socket.accept(PROTOCOL if offered else None)
                code, reason = await _ConsoleConnection(
                    socket, console, found[1], as_json=as_json
                ).run()
                with contextlib.suppress(TimeoutError, RuntimeError):
                    async with asyncio.timeout(SEND_SECONDS):
                        await socket.close(code, reason)
        except AtollError as error:  # Before it was accepted: `run` has its own way.
            await deny(socket, problem(error), error)
        except WebSocketDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the last one before the server; logged there
            answer = await on_unexpected(socket.scope["path"], error)
            await deny(
                socket,
                answer,
                AtollError("Internal error. See the server log.", code="internal_error"),
            )
        finally:
            held.close()


def check_origin(socket: WebSocket, allowed: tuple[str, ...]) -> None:
    """A web page may come from here, or from where it is allowed to; programs say no origin."""
    origin = socket.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc.lower() != socket.headers.get("host", "").lower() or not origin:
        raise Forbidden(
            "Pages of this origin may not connect. Add it to ATOLL_CORS_ORIGINS if they should.",
            code="origin_refused",
        )


def _number(socket: WebSocket, name: str) -> int:
    text = socket.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < MAX_POSITION):
        raise InvalidRequest(f"{name}: a position that a console told.", field=name)
    return int(text)


def _choice(socket: WebSocket, name: str, words: tuple[str, ...]) -> str:
    word = socket.query_params.get(name, words[0])
    if word not in words:
        raise InvalidRequest(f"{name}: one of {', '.join(words)}.", field=name)
    return word


async def deny(socket: WebSocket, answer: Response, error: AtollError) -> None:
    # A server is told how it goes on, whatever was said before.
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        if "websocket.http.response" in socket.scope.get("extensions", {}):
            await socket.send_denial_response(answer)
        else:
            await socket.accept()
            code = REFUSED + answer.status_code - 400
            await socket.close(code, f"{error.code}: {error.message}"[:120])


class _ConsoleConnection:
    """One connection from its acceptance to its close."""

    def __init__(
        self, socket: WebSocket, console: Console, execution_id: str, *, as_json: bool
    ) -> None:
        self._socket = socket
        self._console = console
        self._execution_id = execution_id
        self._as_json = as_json
        self._input: asyncio.Queue[messages.Stdin] = asyncio.Queue(WAITING_INPUT)
        self._bad = 0

    async def run(self) -> tuple[int, str]:
        """The code to close with, and why."""
        work = [
            asyncio.create_task(part())
            for part in (self._tell, self._hear, self._type, self._recheck)
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
        async with asyncio.timeout(SEND_SECONDS):
            if isinstance(content, bytes):
                await self._socket.send_bytes(content)
            else:
                await self._socket.send_text(content)

    async def _tell(self) -> tuple[int, str]:
        """What happens, until the end of it."""
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

    async def _hear(self) -> tuple[int, str]:
        """What the client says, until it goes."""
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1005))
            data = received.get("bytes")
            try:
                message = messages.parse(received["text"] if data is None else data)
            except AtollError as error:
                await self._send(messages.error(error))
                self._bad += 1
                if self._bad >= MAX_BAD:
                    return POLICY, "too many bad messages"
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
        """In order, unless what was typed before is not taken: then a signal is what may help."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OVERTAKE_SECONDS):
                await self._input.join()

    async def _type(self) -> tuple[int, str]:
        """Input, in order."""
        while True:
            message = await self._input.get()
            try:
                await self._console.type(message.data, eof=message.eof)
            except AtollError as error:
                await self._send(messages.error(error))
            self._input.task_done()

    async def _recheck(self) -> tuple[int, str]:
        recheck = self._socket.scope.get("atoll.recheck")
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            if recheck is not None:
                try:
                    await recheck()
                except RequestError as error:
                    return KEY_GONE, error.code
                except AtollError:
                    continue  # The database is away; the key was good.
