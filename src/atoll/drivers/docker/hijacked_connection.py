"""
A request to the engine whose connection becomes the standard streams of a process.

Docker calls this hijacking: after the response head, the client's bytes are standard input, and the
engine's bytes are frames of standard output and standard error.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import RawConnection
from atoll.link.errors import ProtocolViolation

if TYPE_CHECKING:
    from atoll.link.transport import LinkTransport

MAX_RESPONSE_HEAD = 16_384
MAX_ERROR_TEXT = 1000
"""Bytes at the end of standard error, or of a refusal, that are kept for the log."""
MAX_STDERR = 65_536
"""
Bytes of standard error that a relay may write: the link's flow control does not cover them. Our
relay writes one line.
"""
_FRAME = struct.Struct(">BxxxL")
_STDERR = 2

log = structlog.get_logger(__name__)


class HijackedConnection(RawConnection, asyncio.Transport):
    """
    Transport of a link: `write` goes to standard input, and standard output goes to the link. Flow
    control is that of the connection in both directions; only the header of a frame is buffered.
    Reading pauses until there is a link.
    """

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        content = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        self._link: LinkTransport | None = None
        self._unread = b""
        """What arrived with the response, before there was a link."""
        self._engine: asyncio.Transport | None = None
        self._head = bytearray()
        """Incomplete head of the response, then of the current frame."""
        self._remaining = 0
        """Bytes of the current frame that have not arrived."""
        self._is_stderr = False
        self._stderr_tail = b""
        self._stderr_size = 0
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has accepted the request."""

    def carry(self, link: LinkTransport) -> None:
        """Become the transport of a link, once, when the engine has accepted the request."""
        assert self._engine is not None
        self._link = link
        link.connection_made(self)
        if self._engine.is_closing():
            link.connection_lost(None)
            return
        unread, self._unread = self._unread, b""
        self._read_frames(link, unread)
        self._engine.resume_reading()

    # Protocol of the connection to the engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._engine = cast("asyncio.Transport", transport)
        self._engine.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.upgraded.done():
            data = self._read_response(data)
        if self._link is None:
            self._unread += data
        else:
            self._read_frames(self._link, data)

    def _read_frames(self, link: LinkTransport, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if not self._remaining:
                taken = _FRAME.size - len(self._head)
                self._head += view[:taken]
                view = view[taken:]
                if len(self._head) < _FRAME.size:
                    return
                stream, self._remaining = _FRAME.unpack(self._head)
                self._is_stderr = stream == _STDERR
                self._head.clear()
                continue
            piece, view = view[: self._remaining], view[self._remaining :]
            self._remaining -= len(piece)
            if self._is_stderr:
                self._read_stderr(link, piece)
            else:
                link.data_received(bytes(piece))

    def _read_stderr(self, link: LinkTransport, piece: memoryview) -> None:
        self._stderr_tail = (self._stderr_tail + piece)[-MAX_ERROR_TEXT:]
        self._stderr_size += len(piece)
        if self._stderr_size > MAX_STDERR:
            link.violated(
                ProtocolViolation(f"A relay wrote over {MAX_STDERR} bytes to its standard error.")
            )

    def _read_response(self, data: bytes) -> bytes:
        """Returns what follows the head of the response."""
        self._head += data
        head, end, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not end and len(head) < MAX_RESPONSE_HEAD:
            return b""
        self._head.clear()
        fields = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(fields) < 2 or fields[1] not in (b"101", b"200"):
            status = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 500
            message = rest.decode(errors="replace")[:MAX_ERROR_TEXT]
            self._fail(DockerError(status, message))
            return b""
        assert self._engine is not None
        self._engine.pause_reading()
        self.upgraded.set_result(None)
        return rest

    def _fail(self, error: Exception) -> None:
        self.upgraded.set_exception(error)
        # Marked as retrieved: a caller that was cancelled does not await it.
        self.upgraded.exception()
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.upgraded.done():
            self._fail(ConnectionResetError("The engine closed the connection."))
        elif self._link is not None and self.upgraded.exception() is None:
            if self._stderr_tail:
                log.info("relay.ended", output=self._stderr_tail.decode(errors="replace").strip())
            self._link.connection_lost(error)

    def pause_writing(self) -> None:
        if self._link is not None:
            self._link.pause_writing()

    def resume_writing(self) -> None:
        if self._link is not None:
            self._link.resume_writing()

    # Transport of the link

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._engine is not None
        self._engine.write(data)

    def get_write_buffer_size(self) -> int:
        return 0 if self._engine is None else self._engine.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._engine is None or self._engine.is_closing()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def abort(self) -> None:
        if self._engine is not None:
            self._engine.abort()
