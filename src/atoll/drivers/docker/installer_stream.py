"""
What is said with the program of an installation over the standard streams of its container.

Frames as `install_program` has them: an order and its answer, and every connection that was made
inside, each served here as if it had come over a socket. Nothing in the container need reach
anything of the host for that, on whichever machine or in whichever runtime it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker.errors import translated
from atoll.drivers.shared.packages.install_answers import (
    ANSWER_LIMIT,
    ENDED,
    TOO_LONG,
    InstallFailed,
    decoded,
)
from atoll.drivers.shared.packages.install_program import (
    ANSWER,
    DATA,
    END,
    FRAME,
    GONE,
    OPEN,
    ORDER,
    PIECE,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from aiodocker.stream import Message, Stream

    from atoll.drivers.base import Answer

LOG = 2
"""What is printed comes on the standard error."""
MOST_CONNECTIONS = 64
LAST_WORDS_SECONDS = 5.0
READ = 64 * 1024

log = structlog.get_logger(__name__)


class InstallerStream:
    def __init__(
        self, stream: Stream, answer: Answer | None, hear: Callable[[bytes], None]
    ) -> None:
        self._stream = stream
        self._answer = answer
        self._hear = hear
        self._ours: dict[int, asyncio.StreamWriter] = {}
        """The ends of connections into which goes what was said inside."""
        self._writing = asyncio.Lock()

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """`InstallFailed` when it ends without an answer, or says what makes no sense."""
        serving: set[asyncio.Task[None]] = set()
        try:
            await self._send(0, ORDER, json.dumps(order).encode())
            async for number, kind, data in self._frames():
                if kind == ANSWER:
                    await self._hear_out()
                    return decoded(data)
                if kind == OPEN and self._takes(number):
                    for work in await self._opened(number):
                        task = asyncio.create_task(work)
                        serving.add(task)
                        task.add_done_callback(serving.discard)
                elif kind == OPEN:
                    await self._send(number, GONE)
                elif number in self._ours:
                    await self._pass_on(number, kind, data)
            raise InstallFailed(ENDED)
        finally:
            for task in serving:
                task.cancel()
            for writer in self._ours.values():
                writer.close()
            if serving:
                await asyncio.wait(serving)

    async def _hear_out(self) -> None:
        """What it printed before its answer may come after it, by another pipe; then it ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                while (message := await self._read()) is not None:
                    if message.stream == LOG:
                        self._hear(message.data)

    async def _read(self) -> Message | None:
        with translated():
            return await self._stream.read_out()

    def _takes(self, number: int) -> bool:
        """Whether a connection of that number may be made."""
        return (
            self._answer is not None
            and number not in self._ours
            and len(self._ours) < MOST_CONNECTIONS
        )

    async def _opened(self, number: int) -> tuple[Coroutine[Any, Any, None], ...]:
        """A new connection, and what is to be done for it."""
        assert self._answer is not None
        ours, theirs = socket.socketpair()
        reader, self._ours[number] = await asyncio.open_connection(sock=ours)
        return self._serve(self._answer, theirs), self._tell(number, reader)

    async def _frames(self) -> AsyncIterator[tuple[int, bytes, bytes]]:
        said = bytearray()
        while (message := await self._read()) is not None:
            if message.stream == LOG:
                self._hear(message.data)
                continue
            said += message.data
            while len(said) >= FRAME.size:
                number, kind, size = FRAME.unpack_from(said)
                if size > (ANSWER_LIMIT if kind == ANSWER else PIECE):
                    raise InstallFailed(TOO_LONG)
                end = FRAME.size + size
                if len(said) < end:
                    break
                data = bytes(said[FRAME.size : end])
                del said[:end]
                yield number, kind, data

    async def _pass_on(self, number: int, kind: bytes, data: bytes) -> None:
        writer = self._ours[number]
        with contextlib.suppress(OSError):
            if kind == DATA:
                writer.write(data)
                await writer.drain()
            elif kind == END:
                writer.write_eof()
            else:
                writer.close()

    async def _serve(self, answer: Answer, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            await answer(reader, writer)
        except Exception:
            # Of one connection, which ends with that; the installation goes on.
            log.exception("install.connection_failed")
        finally:
            writer.close()

    async def _tell(self, number: int, reader: asyncio.StreamReader) -> None:
        """What was answered, to who asked inside; whoever served it has closed it after that."""
        with contextlib.suppress(OSError):
            while data := await reader.read(READ):
                await self._send(number, DATA, data)
        self._ours.pop(number).close()
        await self._send(number, END)

    async def _send(self, number: int, kind: bytes, data: bytes = b"") -> None:
        async with self._writing:
            # When it is gone, which aiodocker takes for a mistake, there is no answer: that tells.
            with contextlib.suppress(OSError, RuntimeError, AssertionError):
                await self._stream.write_in(FRAME.pack(number, kind, len(data)) + data)
