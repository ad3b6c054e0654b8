"""
Links through the engine, by relays that it starts in containers.

A relay's connection ends with its container. Not always in gVisor: a shim may be left that keeps it
open, silent, for minutes. So the containers that have relays are looked at.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.bundle import EXECUTOR
from atoll.drivers.docker.containers import NODE_LABEL
from atoll.drivers.docker.engine import API, Dialled, translated
from atoll.drivers.docker.links import NAME, RELAY_UID
from atoll.errors import AtollError, TemporaryError
from atoll.link.client import Link, LinkLost, ProtocolViolation

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.drivers.docker.engine import Engine
    from atoll.settings import LinkSettings

LOOK_SECONDS = 2.0
"""Between two looks at which containers run, of which both must miss one."""
BOOT = f"import sys; sys.path.insert(0, {{path!r}}); from {EXECUTOR}.relay import main; main()"
MOST_HEAD = 16_384
MOST_SAID = 1000
MAX_STDERR = 65_536
"""Bytes of a relay's standard error, which cost no credit. A relay of ours writes a line."""
_FRAME = struct.Struct(">BxxxL")
_STDERR = 2

log = structlog.get_logger(__name__)


class Relays:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the label of the containers that are ours."""
        self._engine = engine
        self._node = node
        self._open: dict[Hijacked, str] = {}
        """With the container of each."""
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def connect(
        self,
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
                    number = await _made(self._engine, container, command)
                    self._watch(container, await _begun(self._engine, number, link))
            except AtollError as error:
                # It may be gone, paused, or without room for another process.
                raise LinkLost(f"No relay in container {container}: {error.message}") from error

        return await Link.over(dial, container, settings, timeout=timeout, token=token)

    def _watch(self, container: str, relay: Hijacked) -> None:
        self._open[relay] = container
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_after(), name="docker relays")

    async def _look_after(self) -> None:
        """As long as there are any."""
        missed: set[Hijacked] = set()
        while self._open:
            await asyncio.sleep(LOOK_SECONDS)
            self._open = {one: where for one, where in self._open.items() if not one.is_closing()}
            looked_for = dict(self._open)
            try:
                running = await self._running()
            except TemporaryError as error:
                log.info("relays.not_known", error=error.message)
                continue
            absent = {one for one, container in looked_for.items() if container not in running}
            for one in absent & missed:
                log.info("relay.cut", container=looked_for[one])
                one.abort()
            missed = absent

    async def _running(self) -> set[str]:
        """Paused ones too."""
        filters = {"label": [f"{NODE_LABEL}={self._node}"]}
        with translated():
            async with self._engine.query(
                "containers/json", params={"filters": json.dumps(filters)}
            ) as response:
                return {str(one["Id"]) for one in await response.json()}


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


async def _begun(engine: Engine, number: str, link: Link) -> Hijacked:
    hijacked = Hijacked(f"/{API}/exec/{number}/start", {"Detach": False, "Tty": False}, link)
    try:
        await engine.dial(hijacked)
        await hijacked.begun
    except BaseException:
        hijacked.abort()
        raise
    return hijacked


class Hijacked(Dialled, asyncio.Transport):
    """
    A request to the engine that becomes a connection to a process, as a transport: what is written
    is its standard input, what comes is its standard output. Flow is the connection's own both
    ways: nothing is kept here but the head of a frame.
    """

    def __init__(self, path: str, body: dict[str, Any], link: Link) -> None:
        super().__init__()
        content = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        self._link = link
        self._lower: asyncio.Transport | None = None
        self._head = bytearray()
        """Of the answer, then of the next frame."""
        self._left = 0
        """Bytes of the frame that are still to come."""
        self._is_error = False
        self._said = b""
        """The end of what the process wrote to its standard error."""
        self._errors = 0
        """Bytes that it wrote there."""
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
                self._take_error(piece)
            else:
                self._link.data_received(bytes(piece))

    def _take_error(self, piece: memoryview) -> None:
        self._said = (self._said + piece)[-MOST_SAID:]
        self._errors += len(piece)
        if self._errors > MAX_STDERR:
            self._link.violated(
                ProtocolViolation(f"A relay wrote over {MAX_STDERR} bytes to its standard error.")
            )

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
        self._link.connection_made(self)
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
            self._link.connection_lost(error)

    def pause_writing(self) -> None:
        self._link.pause_writing()

    def resume_writing(self) -> None:
        self._link.resume_writing()

    # Towards the link

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._lower is not None
        self._lower.write(data)

    def get_write_buffer_size(self) -> int:
        return 0 if self._lower is None else self._lower.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._lower is None or self._lower.is_closing()

    def close(self) -> None:
        if self._lower is not None:
            self._lower.close()

    def abort(self) -> None:
        if self._lower is not None:
            self._lower.abort()
