"""
How the executor of a container is reached.

By a unix socket in a directory that it shares with us, where there is one. Else through the engine:
a relay that the engine starts in the container takes the link's bytes on its standard input, and
says those of the executor on its standard output. That connection is the engine's own, so it is as
safe as all else that is told to the engine; and the container needs no network. The relay is of
another user than user code, and the executor listens to nobody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.bundle import PACKAGE
from atoll.drivers.docker.engine import API, Dialled, translated
from atoll.errors import AtollError
from atoll.link.client import Link, LinkLost

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.docker.engine import Engine
    from atoll.settings import LinkSettings

SOCKET, RELAY = "socket", "relay"
"""The two ways, as a container's label names them."""
FILE = "link.sock"
NAME = "atoll-link"
"""Abstract name of the socket that relays connect to."""
RELAY_UID = 1001
RELAYS = 16
"""Relays that a container has room for beside user code's processes."""
BOOT = f"import sys; sys.path.insert(0, {{path!r}}); from {PACKAGE}.relay import main; main()"
MOST_HEAD = 16_384
MOST_SAID = 1000
_FRAME = struct.Struct(">BxxxL")
_STDERR = 2

log = structlog.get_logger(__name__)


async def by_socket(
    directory: Path, settings: LinkSettings, *, timeout: timedelta, token: str
) -> Link:
    try:
        fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LinkLost(f"{directory} is gone.") from None
    try:
        # Through the descriptor: the whole path may be longer than a socket's name can be.
        path = f"/proc/self/fd/{fd}/{FILE}"
        return await Link.connect(path, settings, timeout=timeout, token=token)
    finally:
        os.close(fd)


async def by_relay(
    engine: Engine,
    container: str,
    python: list[str],
    executor: str,
    settings: LinkSettings,
    *,
    timeout: timedelta,
    token: str,
) -> Link:
    """`python` is the interpreter inside, `executor` the path of the bundle there."""
    command = [*python, "-I", "-S", "-B", "-c", BOOT.format(path=executor), NAME]

    async def dial(link: Link) -> None:
        try:
            with translated():
                number = await _made(engine, container, command)
                await _begun(engine, number, link)
        except AtollError as error:
            # It may be gone, paused, or without room for another process.
            raise LinkLost(f"No relay in container {container}: {error.message}") from error

    return await Link.over(dial, container, settings, timeout=timeout, token=token)


async def _made(engine: Engine, container: str, command: list[str]) -> str:
    body = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "User": f"{RELAY_UID}:{RELAY_UID}",
        "WorkingDir": "/",
        "Cmd": command,
    }
    async with engine.query(
        f"containers/{container}/exec", method="POST", data=json.dumps(body)
    ) as response:
        return str((await response.json())["Id"])


async def _begun(engine: Engine, number: str, link: Link) -> None:
    hijacked = Hijacked(f"/{API}/exec/{number}/start", {"Detach": False, "Tty": False}, link)
    try:
        await engine.dial(hijacked)
        await hijacked.begun
    except BaseException:
        hijacked.abort()
        raise


class Hijacked(Dialled, asyncio.Transport):
    """
    A request to the engine that becomes a connection to a process, as a transport: what is written
    is its standard input, what comes is its standard output. Flow is the connection's own both
    ways: nothing is kept here but the head of a frame.
    """

    def __init__(self, path: str, body: dict[str, Any], protocol: asyncio.Protocol) -> None:
        super().__init__()
        content = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        self._protocol = protocol
        self._lower: asyncio.Transport | None = None
        self._head = bytearray()
        """Of the answer, then of the next frame."""
        self._left = 0
        """Bytes of the frame that are still to come."""
        self._is_error = False
        self._said = b""
        """The end of what the process wrote to its standard error."""
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has agreed."""

    # Towards the engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lower = cast("asyncio.Transport", transport)
        self._lower.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            data = self._answered(data)
        view = memoryview(data)
        while view:
            if not self._left:
                taken = _FRAME.size - len(self._head)
                self._head += view[:taken]
                view = view[taken:]
                if len(self._head) < _FRAME.size:
                    return
                stream, self._left = _FRAME.unpack(self._head)
                self._is_error = stream == _STDERR
                self._head.clear()
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._is_error:
                self._said = (self._said + piece)[-MOST_SAID:]
            else:
                self._protocol.data_received(bytes(piece))

    def _answered(self, data: bytes) -> bytes:
        """Look for the end of the answer's head; what is behind it."""
        self._head += data
        head, end, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not end and len(head) < MOST_HEAD:
            return b""
        self._head.clear()
        words = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(words) < 2 or words[1] not in (b"101", b"200"):
            status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 500
            message = rest.decode(errors="replace")[:MOST_SAID]
            self._refused(DockerError(status, message))
            return b""
        self._protocol.connection_made(self)
        self.begun.set_result(None)
        return rest

    def _refused(self, error: Exception) -> None:
        self.begun.set_exception(error)
        self.begun.exception()  # Retrieved: who was cancelled meanwhile does not wait for it.
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.begun.done():
            self._refused(ConnectionResetError("The engine ended the connection."))
        elif self.begun.exception() is None:
            if self._said:
                log.info("relay.ended", said=self._said.decode(errors="replace").strip())
            self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # Towards the link

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._lower is not None
        self._lower.write(data)

    def is_closing(self) -> bool:
        return self._lower is None or self._lower.is_closing()

    def close(self) -> None:
        if self._lower is not None:
            self._lower.close()

    def abort(self) -> None:
        if self._lower is not None:
            self._lower.abort()
