"""
A raw keep-alive client: as little of its own as can be, so that what is measured is the server.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any


def _request(method: str, path: str, key: str, body: Any) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


class Client:
    """One connection, one request at a time, blocking."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._key = key

    def prepare(self, method: str, path: str, body: Any = None) -> bytes:
        return _request(method, path, self._key, body)

    def send(self, request: bytes) -> tuple[int, bytes]:
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._read()
        total = end + 4 + _length(data[:end])
        while len(data) < total:
            data += self._read()
        return int(data[9:12]), data[end + 4 :]

    def _read(self) -> bytes:
        piece = self._socket.recv(65_536)
        if not piece:
            raise ConnectionError("the server closed the connection")
        return piece

    def call(self, method: str, path: str, body: Any = None) -> Any:
        status, content = self.send(self.prepare(method, path, body))
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {content[:500]!r}")
        return json.loads(content) if content else None

    def close(self) -> None:
        self._socket.close()


class AsyncClient(asyncio.Protocol):
    """The same for many connections in one loop."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, host: str, port: int) -> AsyncClient:
        _, client = await asyncio.get_running_loop().create_connection(cls, host, port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or len(self._buffer) < end + 4 + _length(self._buffer[:end]):
            return
        status, self._buffer = int(self._buffer[9:12]), b""
        assert self._answer is not None
        self._answer.set_result(status)

    async def send(self, request: bytes) -> int:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
