"""
The terminal, or the pipes, of an execution that runs: watched, and typed to.

A console reads along by itself. What it has read waits, up to a bound, for who iterates; beyond
that the server waits, and in the end the execution's old output is dropped, never its life. A
connection that breaks is taken up again where it broke, as long as a restart of the server may
take; input that was on its way then may be lost.
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

_WAITING = 64
_PIECE = 32 * 1024
_FINAL = frozenset({1002, 1003, 1007, 1009, 4401})
"""Close codes after which it would be no use to come again."""


class AsyncConsole:
    """One who watches an execution; the first of them types, and the next when that one leaves."""

    def __init__(self, http: HttpClient, path: str, watch: bool) -> None:
        self._http = http
        self._path = path
        self._watch = watch
        self._after = 0
        self._socket: Socket | None = None
        self._connected = asyncio.Event()
        self._started = asyncio.Event()
        self._typing = False
        self._turn = asyncio.Event()
        """Cleared while a connection that broke has not yet got its turn to type back."""
        self._turn.set()
        self._status = "pending"
        self._terminal = False
        self._size: tuple[int, int] | None = None
        self._events: asyncio.Queue[ConsoleEvent | AtollError | None] = asyncio.Queue(_WAITING)
        self._exit: ConsoleExit | None = None
        self._over: AtollError | None = None

    @property
    def typing(self) -> bool:
        """Whether this one may type."""
        return self._typing

    @property
    def status(self) -> str:
        """Where the execution is, as far as was heard."""
        return self._status

    @property
    def terminal(self) -> bool:
        """Whether the execution runs on a terminal, and not on pipes."""
        return self._terminal

    async def send(self, data: str | bytes, *, eof: bool = False) -> None:
        """
        Input, when the execution has begun; `eof` says that no more will come. What cannot be taken
        is told by an event of kind `error`: `console_taken` while somebody else types.
        """
        content = data.encode() if isinstance(data, str) else data
        await self._until_started()
        for start in range(0, len(content), _PIECE):
            await self._say(content[start : start + _PIECE])
        if eof:
            await self._say(json.dumps({"type": "stdin", "eof": True}))

    async def resize(self, rows: int, cols: int) -> None:
        """The size of the terminal, which is that of the one who types."""
        self._size = (rows, cols)
        await self._say(_resize(rows, cols))

    async def signal(self, name: str) -> None:
        """A signal (INT, TERM, HUP, …) to what is in the foreground of the terminal."""
        await self._until_started()
        await self._say(json.dumps({"type": "signal", "signal": name}))

    async def end(self) -> None:
        """Cancel the execution; what is left of its output and its exit still come."""
        await self._say(json.dumps({"type": "close", "end": True}))

    async def __aiter__(self) -> AsyncIterator[ConsoleEvent]:
        """What happens, from what is left of the output on; the last one is the `exit`."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, AtollError):
                self._events.put_nowait(event)  # for who asks again
                raise event
            yield event
        self._events.put_nowait(None)

    async def wait(self) -> ConsoleExit:
        """How it ended, when it has; what nobody has iterated over is passed by."""
        async for _ in self:
            pass
        if self._exit is None:
            raise self._over or _left()
        return self._exit

    def _leave(self) -> None:
        """Whoever still listens or waits to say something is let go."""
        self._over = self._over or _left()
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
        with suppress(TimeoutError):  # Another one was in line, which the server tells.
            async with asyncio.timeout(Backoff.limit):
                await self._turn.wait()
        if self._over is not None:
            raise self._over

    async def _say(self, message: bytes | str) -> None:
        while self._exit is None:
            await self._connected.wait()
            if self._over is not None:
                raise self._over
            if self._socket is not None:
                socket = self._socket
                with suppress(Closed):
                    return await socket.send(message)
                if self._socket is socket:
                    # Whoever reads sees it too, and connects again.
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
                    await self._again(backoff, closed)
                except TemporaryError as error:
                    await backoff.wait_or_raise(error)
            await self._events.put(None)
        except AtollError as error:
            self._over = error
            await self._events.put(error)
        finally:
            for waited in (self._connected, self._started, self._turn):
                waited.set()

    async def _again(self, backoff: Backoff, closed: Closed) -> None:
        self._connected.clear()
        if self._typing:
            self._typing = False
            self._turn.clear()
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
        if closed.code in _FINAL:
            raise PermanentError(f"The server closed the console: {closed}.", code="console_closed")
        await backoff.wait_or_raise(
            TemporaryError(f"The console broke: {closed}.", code="stream_cut")
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
                    f"The server says what is no message of a console: {error}", code="bad_answer"
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
                self._turn.set()
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
        return None  # of a newer server


def _left() -> AtollError:
    return InvalidRequest("This console was left.", code="console_closed")


def _resize(rows: int, cols: int) -> str:
    return json.dumps({"type": "resize", "rows": rows, "cols": cols})


@asynccontextmanager
async def open_console(http: HttpClient, path: str, *, watch: bool) -> AsyncIterator[AsyncConsole]:
    """A console for the length of an `async with`; the execution goes on after that."""
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
