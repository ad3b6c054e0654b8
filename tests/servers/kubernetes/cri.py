"""
Asks containerd for the version of its CRI service, by gRPC in its shortest form.

A kubelet ends when that service is not initialized, which it is only some time after containerd
accepts other requests.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import BinaryIO

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_REQUEST = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/runtime.v1.RuntimeService/Version",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}
_EMPTY_MESSAGE = bytes(5)


def answers(path: Path) -> bool:
    """Whether it responds with a message, and not with an error or not at all."""
    headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in _REQUEST.items())
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            connection.sendall(
                _PREFACE
                + _frame(_SETTINGS, 0, 0, b"")
                + _frame(_HEADERS, _END_HEADERS, 1, headers)
                + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
            )
            with connection.makefile("rb") as stream:
                return _has_message(stream)
    except OSError:
        return False


def _has_message(stream: BinaryIO) -> bool:
    while head := stream.read(9):
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream.read(length)
        if kind == _DATA and length:
            return True
        # Only an error has no message before the end.
        if kind == _HEADERS and flags & _END_STREAM:
            return False
    return False


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return (
        len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
    )


def _text(text: str) -> bytes:
    """In HPACK, uncompressed."""
    return bytes([len(text)]) + text.encode()
