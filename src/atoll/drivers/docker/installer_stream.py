"""
Protocol with an installation's program, over the standard streams of its container.

The frames are those of `install_program`: an order, its answer, and the data of connections that
the program accepts inside the container. Each connection is served here as if it had come over a
socket. The container therefore needs no network, on whichever machine or runtime it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker.errors import translated
from atoll.drivers.shared.packages.install_program import (
    ANSWER,
    CHUNK_SIZE,
    DATA,
    END,
    FRAME,
    GONE,
    OPEN,
    ORDER,
)
from atoll.drivers.shared.packages.install_results import (
    ANSWER_LIMIT,
    ENDED,
    TOO_LONG,
    InstallFailed,
    decoded,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from aiodocker.stream import Message, Stream

    from atoll.drivers.base import ConnectionHandler

STDERR = 2
"""The program's frames go to standard output, and all other output to standard error."""
MAX_CONNECTIONS = 64
LOG_TIMEOUT = 5.0
"""Seconds to wait for output that was printed before the answer."""
READ_SIZE = 64 * 1024

log = structlog.get_logger(__name__)


class InstallerStream:
    def __init__(
        self, stream: Stream, handler: ConnectionHandler | None, on_output: Callable[[bytes], None]
    ) -> None:
        """Without a `handler`, connections are refused."""
        self._stream = stream
        self._handler = handler
        self._on_output = on_output
        self._connections: dict[int, asyncio.StreamWriter] = {}
        """Writers to which data of connections is passed, by number."""
        self._write_lock = asyncio.Lock()

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Raises `InstallFailed` if the program ends without a valid answer."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            await self._send(0, ORDER, json.dumps(order).encode())
            async for number, kind, data in self._frames():
                if kind == ANSWER:
                    await self._read_rest_of_log()
                    return decoded(data)
                if kind == OPEN and self._may_open(number):
                    for work in await self._open(number):
                        task = asyncio.create_task(work)
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                elif kind == OPEN:
                    await self._send(number, GONE)
                elif number in self._connections:
                    await self._receive(number, kind, data)
            raise InstallFailed(ENDED)
        finally:
            for task in tasks:
                task.cancel()
            for writer in self._connections.values():
                writer.close()
            if tasks:
                await asyncio.wait(tasks)

    # Frames

    async def _read(self) -> Message | None:
        with translated():
            return await self._stream.read_out()

    async def _frames(self) -> AsyncIterator[tuple[int, bytes, bytes]]:
        received = bytearray()
        while (message := await self._read()) is not None:
            if message.stream == STDERR:
                self._on_output(message.data)
                continue
            received += message.data
            while len(received) >= FRAME.size:
                number, kind, size = FRAME.unpack_from(received)
                if size > (ANSWER_LIMIT if kind == ANSWER else CHUNK_SIZE):
                    raise InstallFailed(TOO_LONG)
                end = FRAME.size + size
                if len(received) < end:
                    break
                data = bytes(received[FRAME.size : end])
                del received[:end]
                yield number, kind, data

    async def _read_rest_of_log(self) -> None:
        """Output that was printed before the answer may arrive after it, by another pipe."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOG_TIMEOUT):
                while (message := await self._read()) is not None:
                    if message.stream == STDERR:
                        self._on_output(message.data)

    async def _send(self, number: int, kind: bytes, data: bytes = b"") -> None:
        async with self._write_lock:
            # Errors mean that the container is gone, which `ask` notices: there is no answer then.
            with contextlib.suppress(OSError, RuntimeError, AssertionError):
                await self._stream.write_in(FRAME.pack(number, kind, len(data)) + data)

    # Connections

    def _may_open(self, number: int) -> bool:
        return (
            self._handler is not None
            and number not in self._connections
            and len(self._connections) < MAX_CONNECTIONS
        )

    async def _open(self, number: int) -> tuple[Coroutine[Any, Any, None], ...]:
        """Open a connection; the coroutines are its work."""
        assert self._handler is not None
        ours, theirs = socket.socketpair()
        reader, self._connections[number] = await asyncio.open_connection(sock=ours)
        return self._serve(self._handler, theirs), self._send_response(number, reader)

    async def _receive(self, number: int, kind: bytes, data: bytes) -> None:
        writer = self._connections[number]
        with contextlib.suppress(OSError):
            if kind == DATA:
                writer.write(data)
                await writer.drain()
            elif kind == END:
                writer.write_eof()
            else:
                writer.close()

    async def _serve(self, handler: ConnectionHandler, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            await handler(reader, writer)
        except Exception:
            # Only this connection fails; the installation continues.
            log.exception("install.connection_failed")
        finally:
            writer.close()

    async def _send_response(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_SIZE):
                await self._send(number, DATA, data)
        self._connections.pop(number).close()
        await self._send(number, END)
