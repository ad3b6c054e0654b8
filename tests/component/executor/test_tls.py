"""TLS of executors that are reached over TCP: a non-blocking socket with small buffers."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from atoll.drivers.kubernetes import credentials
from atoll.executor import tls
from atoll.executor.tls import TlsSocket

SIZE = 3_000_000
SMALL = 8192
"""Bytes that the kernel buffers in one direction: most writes are partial."""


@pytest.fixture(scope="module")
def key() -> credentials.KeyPair:
    return credentials.make_key_pair("inst_0123456789abcdef0123")


@pytest.fixture
def ends(key: credentials.KeyPair) -> Iterator[tuple[TlsSocket, socket.socket]]:
    """The executor's end, and a client's plain socket."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    ours.setblocking(False)
    theirs.settimeout(30)
    with ours, theirs:
        yield TlsSocket(ours, tls.server_context(key.pem)), theirs


def receive(end: TlsSocket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        select.select([end], [], [], 30)
        try:
            received += end.recv(1 << 18)
        except BlockingIOError:
            continue
    return received


def send(end: TlsSocket, data: bytes) -> None:
    """As `Connection` does: what is left is offered again, with more behind it."""
    left = data
    while left:
        try:
            left = left[end.send(left) :]
        except BlockingIOError:
            select.select([], [end], [], 30)


def test_large_messages_arrive_in_both_directions(
    ends: tuple[TlsSocket, socket.socket], key: credentials.KeyPair
) -> None:
    executor, plain = ends
    question, answer = os.urandom(SIZE), os.urandom(SIZE)
    received: list[bytes] = []
    fingerprints: list[str] = []

    def client() -> None:
        with credentials.client_context().wrap_socket(plain) as secured:
            certificate = secured.getpeercert(binary_form=True)
            assert certificate is not None
            fingerprints.append(credentials.fingerprint(certificate))
            secured.sendall(question)
            data = b""
            while len(data) < SIZE:
                data += secured.recv(1 << 16)
            received.append(data)

    thread = threading.Thread(target=client)
    thread.start()
    assert receive(executor, SIZE) == question
    send(executor, answer)
    thread.join(30)

    assert received == [answer]
    assert fingerprints == [key.fingerprint]


@pytest.mark.parametrize("last", [b"", b"last words"], ids=len)
def test_a_client_that_closes_gets_an_answer(
    ends: tuple[TlsSocket, socket.socket], last: bytes
) -> None:
    executor, plain = ends
    closed = threading.Event()

    def client() -> None:
        secured = credentials.client_context().wrap_socket(plain)
        secured.sendall(b"x" + last)
        # Returns when the answer has arrived.
        secured.unwrap().close()
        closed.set()

    thread = threading.Thread(target=client)
    thread.start()
    received = b""
    while True:
        select.select([executor], [], [], 30)
        try:
            piece = executor.recv(1 << 18)
        except BlockingIOError:
            continue
        if not piece:
            break
        received += piece
    thread.join(30)
    assert received == b"x" + last
    assert closed.is_set()


def test_what_is_not_tls_ends_the_connection(ends: tuple[TlsSocket, socket.socket]) -> None:
    executor, plain = ends
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with pytest.raises(ssl.SSLError):
        receive(executor, 1)


@pytest.mark.parametrize(
    "text", [b"", b"-----BEGIN PRIVATE KEY-----\n", b"x" * (tls.MAX_KEY + 2)], ids=len
)
def test_an_incomplete_key_is_refused(text: bytes) -> None:
    read, write = os.pipe()
    os.write(write, text)
    os.close(write)
    try:
        with pytest.raises(ValueError, match="no private key"):
            tls.read_key(read)
    finally:
        os.close(read)


def test_the_key_is_read_up_to_the_empty_line(key: credentials.KeyPair) -> None:
    read, write = os.pipe()
    os.write(write, key.pem)
    try:
        assert tls.read_key(read) == key.pem
    finally:
        os.close(read)
        os.close(write)


def test_a_reply_between_two_writes_sends_nothing_twice(
    ends: tuple[TlsSocket, socket.socket],
) -> None:
    executor, plain = ends
    data = os.urandom(SIZE)
    received: list[bytes] = []

    def client() -> None:
        with credentials.client_context().wrap_socket(plain) as secured:
            piece, whole = b"-", b""
            secured.sendall(b"go")
            while piece and len(whole) < SIZE:
                piece = secured.recv(1 << 14)
                whole += piece
                secured.sendall(b"credit")  # Read by the executor while it still has to send.
            received.append(whole)

    thread = threading.Thread(target=client)
    thread.start()
    assert receive(executor, 2) == b"go"
    left = data
    while left:
        readable, writable, _ = select.select([executor], [executor], [], 30)
        try:
            if readable:
                executor.recv(1 << 18)
        except BlockingIOError:
            pass
        try:
            if writable:
                left = left[executor.send(left) :]
        except BlockingIOError:
            pass
    thread.join(30)

    assert received == [data]
