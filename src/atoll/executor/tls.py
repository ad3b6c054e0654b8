"""
TLS on the connections of an executor that is reached over TCP.

The private key arrives on the standard input after the zygote was forked, so that no process of
user code has a copy of it. The control plane knows the certificate and proves itself by its token.
"""

from __future__ import annotations

import _socket
import os
import ssl

MAX_KEY = 16_384
RECORD = 16_384
"""Bytes of one TLS record."""
READ_SIZE = 262_144
ASK = b"key\n"
"""What the executor writes when it is ready to read its key."""


def read_key(fd: int) -> bytes:
    """Read the private key and its certificate (PEM), which an empty line ends."""
    text = b""
    while not text.endswith(b"\n\n"):
        piece = os.read(fd, MAX_KEY)
        if not piece or len(text) > MAX_KEY:
            raise ValueError("the standard input has no private key")
        text += piece
    return text


def server_context(pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # `load_cert_chain` reads files alone, and no file may contain the key.
    fd = os.memfd_create("key")
    try:
        os.write(fd, pem)
        context.load_cert_chain("/proc/self/fd/%d" % fd)
    finally:
        os.close(fd)
    return context


class TlsSocket:
    """The part of a non-blocking socket's interface that `Connection` uses, with TLS on top."""

    def __init__(self, socket: _socket.socket, context: ssl.SSLContext) -> None:
        self._socket = socket
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._unsent = b""
        """Encrypted bytes that the socket has not taken yet."""
        self._owed = 0
        """How many bytes of the caller are among `_unsent`, and were not reported as sent."""
        self._shaken = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def recv(self, size: int) -> bytes:
        """Raises `BlockingIOError` while there is nothing to read."""
        data = self._socket.recv(READ_SIZE)
        if not data:
            return b""
        self._incoming.write(data)
        pieces, closes = [], False
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while not closes:
                piece = self._tls.read(READ_SIZE)
                pieces.append(piece)
                closes = not piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            closes = True
        finally:
            if closes:
                self._answer_close()
            self._flush()
        if not pieces and not closes:
            raise BlockingIOError
        return b"".join(pieces)

    def _answer_close(self) -> None:
        """The other end closes, and keeps the connection until it has an answer."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # It has closed the socket too.

    def send(self, data: bytes | bytearray) -> int:
        """
        Raises `BlockingIOError` until the socket has taken all of what was encrypted; the caller
        repeats the call with the same data then, and perhaps more.
        """
        # Not `_unsent`: a reply to what was read may have sent it meanwhile.
        if not self._owed:
            self._owed = self._tls.write(memoryview(data)[: 4 * RECORD])
        if not self._flush():
            raise BlockingIOError
        sent, self._owed = self._owed, 0
        return sent

    def _flush(self) -> bool:
        """Whether the socket has taken everything."""
        self._unsent += self._outgoing.read()
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return False
        return True
