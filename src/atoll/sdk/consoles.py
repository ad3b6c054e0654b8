"""
Consoles: interactive connections to the terminal, or the pipes, of a running execution.

A console reads in the background and buffers a bounded number of events. If nobody iterates, the
server waits, and finally drops old output; the execution is not affected. After a lost connection
the console resumes for as long as a restart of the server may take. Input in flight may be lost.
"""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, InvalidRequest, PermanentError, TemporaryError
from atoll.sdk.decode import decode
from atoll.sdk.retry import Backoff
from atoll.sdk.values import ConsoleEvent, ConsoleExit
from atoll.sdk.websocket import Closed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.websocket import Socket

_MAX_BUFFERED = 64
"""Events."""
_CHUNK = 32 * 1024
_FINAL = frozenset({1002, 1003, 1007, 1009, 4401})
"""Close codes after which reconnecting is pointless."""


class AsyncConsole:
    """
    A connection to a running execution. Only one console may type at a time: the first one, and
    after it leaves, the next.
    """

    def __init__(self, http: HttpClient, path: str, watch: bool) -> None:
        self._http = http
        self._path = path
        self._watch = watch
        self._after = 0
        self._socket: Socket | None = None
        self._connected = asyncio.Event()
        self._started = asyncio.Event()
        self._typing = False
        self._may_type = asyncio.Event()
        """Cleared after a reconnect, until this console may type again."""
        self._may_type.set()
        self._status = "pending"
        self._terminal = False
        self._size: tuple[int, int] | None = None
        self._events: asyncio.Queue[ConsoleEvent | AtollError | None] = asyncio.Queue(_MAX_BUFFERED)
        self._exit: ConsoleExit | None = None
        self._error: AtollError | None = None

    @property
    def typing(self) -> bool:
        """Whether this console may type."""
        return self._typing

    @property
    def status(self) -> str:
        """Last known status of the execution."""
        return self._status

    @property
    def terminal(self) -> bool:
        """Whether the execution runs on a terminal rather than on pipes."""
        return self._terminal

    async def send(self, data: str | bytes, *, eof: bool = False) -> None:
        """
        Send input, after waiting for the execution to start; `eof` closes the input. Refused input
        causes an `error` event, with the code `console_taken` while another console types.
        """
        content = data.encode() if isinstance(data, str) else data
        await self._until_started()
        for start in range(0, len(content), _CHUNK):
            await self._transmit(content[start : start + _CHUNK])
        if eof:
            await self._transmit(json.dumps({"type": "stdin", "eof": True}))

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal. Takes effect while this console may type."""
        self._size = (rows, cols)
        await self._transmit(_resize(rows, cols))

    async def signal(self, name: str) -> None:
        """Send a signal (INT, TERM, HUP, …) to the foreground process of the terminal."""
        await self._until_started()
        await self._transmit(json.dumps({"type": "signal", "signal": name}))

    async def end(self) -> None:
        """Cancel the execution. The remaining output and the `exit` event still arrive."""
        await self._transmit(json.dumps({"type": "close", "end": True}))

    async def __aiter__(self) -> AsyncIterator[ConsoleEvent]:
        """Events, starting with the buffered output. The last one is the `exit`."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, AtollError):
                self._events.put_nowait(event)  # For the next iteration.
                raise event
            yield event
        self._events.put_nowait(None)

    async def wait(self) -> ConsoleExit:
        """Wait for the end, skipping events that were not iterated."""
        async for _ in self:
            pass
        if self._exit is None:
            raise self._error or _closed_error()
        return self._exit

    def _leave(self) -> None:
        """End pending iterations and sends."""
        self._error = self._error or _closed_error()
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def _connect(self) -> Socket:
        query = {"format": "json", "after": str(self._after)}
        if self._watch:
            query["mode"] = "watch"
        socket = await self._http.socket(self._path, query)
        if self._size is not None:
            with suppress(Closed):
                await socket.send(_resize(*self._size))
        self._connected.set()
        return socket

    async def _until_started(self) -> None:
        await self._started.wait()
        with suppress(TimeoutError):  # Another console types; the server reports that.
            async with asyncio.timeout(Backoff.limit):
                await self._may_type.wait()
        if self._error is not None:
            raise self._error

    async def _transmit(self, message: bytes | str) -> None:
        while self._exit is None:
            await self._connected.wait()
            if self._error is not None:
                raise self._error
            if self._socket is not None:
                socket = self._socket
                with suppress(Closed):
                    return await socket.send(message)
                if self._socket is socket:
                    # The reading task notices as well, and reconnects.
                    await asyncio.sleep(0.05)

    async def _read(self) -> None:
        backoff = Backoff()
        try:
            while self._exit is None:
                try:
                    if self._socket is None:
                        self._socket = await self._connect()
                    await self._read_from(self._socket, backoff)
                except Closed as closed:
                    await self._reconnect(backoff, closed)
                except TemporaryError as error:
                    await backoff.wait_or_raise(error)
            await self._events.put(None)
        except AtollError as error:
            self._error = error
            await self._events.put(error)
        finally:
            for waited in (self._connected, self._started, self._may_type):
                waited.set()

    async def _reconnect(self, backoff: Backoff, closed: Closed) -> None:
        self._connected.clear()
        if self._typing:
            self._typing = False
            self._may_type.clear()
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
        if closed.code in _FINAL:
            raise PermanentError(f"The server closed the console: {closed}.", code="console_closed")
        await backoff.wait_or_raise(
            TemporaryError(f"The console connection was lost: {closed}.", code="stream_cut")
        )

    async def _read_from(self, socket: Socket, backoff: Backoff) -> None:
        while self._exit is None:
            message = await socket.receive()
            backoff.reset()
            try:
                content = json.loads(message)
                event = self._event(content["type"], content)
            except (KeyError, TypeError, ValueError) as error:
                raise PermanentError(
                    f"The server sent an invalid console message: {error}", code="bad_answer"
                ) from None
            if event is not None:
                await self._events.put(event)

    def _event(self, kind: str, content: dict[str, Any]) -> ConsoleEvent | None:
        if kind == "stdout" or kind == "stderr":
            self._after = max(self._after, content["position"])
            return ConsoleEvent(
                "stdout" if kind == "stdout" else "stderr", base64.b64decode(content["base64"])
            )
        if kind == "status":
            self._status, self._typing = content["status"], content["typing"]
            self._terminal = content["terminal"]
            if self._typing:
                self._may_type.set()
            if self._status != "pending":
                self._started.set()
            return ConsoleEvent("status", status=self._status, typing=self._typing)
        if kind == "error":
            message = str(content["message"])
            return ConsoleEvent("error", code=str(content["code"]), message=message)
        if kind == "exit":
            self._exit = decode(ConsoleExit, content)
            self._status = self._exit.status
            return ConsoleEvent("exit", status=self._status, exit=self._exit)
        return None  # An event of a newer server.


def _closed_error() -> AtollError:
    return InvalidRequest("This console is closed.", code="console_closed")


def _resize(rows: int, cols: int) -> str:
    return json.dumps({"type": "resize", "rows": rows, "cols": cols})


@asynccontextmanager
async def open_console(http: HttpClient, path: str, *, watch: bool) -> AsyncIterator[AsyncConsole]:
    """A console for the length of an `async with` block. The execution continues after it."""
    console = AsyncConsole(http, path, watch)
    console._socket = await console._connect()
    reading = asyncio.create_task(console._read())
    try:
        yield console
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        console._leave()
        if console._socket is not None:
            await console._socket.close()
