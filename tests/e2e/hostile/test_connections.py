"""Clients, with or without a key, that open connections and send incomplete requests."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from atoll.api.rest.server import http_connections
from tests import preloaded
from tests.e2e.api import V1, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 8
SETTINGS = {
    "ATOLL_POOL__SIZE": "0",
    "ATOLL_CONNECTION__MAX_CONNECTIONS": str(LIMIT),
}
CONSTANTS = {
    f"{http_connections.__name__}.HEADER_TIMEOUT": 1.0,
    f"{http_connections.__name__}.BODY_TIMEOUT": 1.0,
}
HALF = b"GET /api/v1/sessions HTTP/1.1\r\nHost: a\r\nX-"


@pytest.fixture(scope="module")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("connections"), **SETTINGS).with_constants(
        CONSTANTS
    ) as started:
        yield started


@pytest.fixture
def connect(server: Server) -> Iterator[Any]:
    """Opens connections that are closed after the test."""
    place = urlsplit(server.url)
    with ExitStack() as stack:

        def connect(data: bytes = b"") -> socket.socket:
            made = socket.create_connection((place.hostname, place.port), timeout=20)
            stack.callback(made.close)
            if data:
                made.sendall(data)
            return made

        yield connect


def read_to_close(made: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    received = b""
    try:
        while piece := made.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def document(received: bytes) -> dict[str, Any]:
    """The problem document of a response."""
    found: dict[str, Any] = json.loads(received.partition(b"\r\n\r\n")[2])
    return found


@pytest.mark.quick
def test_incomplete_requests_are_closed_and_block_no_other_client(
    server: Server, connect: Any
) -> None:
    held = [connect(HALF) for _ in range(4 * LIMIT)]
    with server.client() as http:
        assert http.get(f"{V1}/sessions").status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    answers = [read_to_close(one) for one in held]
    # The oldest made room for others; the time of the newest is over.
    assert answers[0] == b""
    assert answers[-1].startswith(b"HTTP/1.1 408 ")
    assert document(answers[-1])["code"] == "request_timeout"


@pytest.mark.parametrize(
    "drip", [HALF, b"\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" + HALF], ids=str
)
def test_a_header_sent_byte_by_byte_still_times_out(drip: bytes, connect: Any) -> None:
    made = connect(drip)
    made.settimeout(0.2)
    received = b""
    while True:
        try:
            made.sendall(b"\r\n" if drip == b"\r\n" else b"a")
            piece = made.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
        if not piece:
            break
        received += piece
    assert b"request_timeout" in received


@pytest.mark.parametrize("known", [False, True], ids=["without a key", "with a key"])
def test_a_stalled_body_times_out(server: Server, connect: Any, known: bool) -> None:
    key = f"Authorization: Bearer {server.key}\r\n" if known else ""
    head = f"POST {V1}/sessions HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 100\r\n\r\n{{"
    received = read_to_close(connect(head.encode()))
    expected = "request_timeout" if known else "key_missing"
    assert document(received)["code"] == expected


def test_a_slow_upload_with_progress_is_accepted(server: Server) -> None:
    """Longer than the time-out in all, with something in between."""
    pieces = 8

    def slow() -> Iterator[bytes]:
        with httpx.Client(base_url=server.url, timeout=30) as other:
            for _ in range(pieces):
                # The pause is the server's own: it waits for events that do not come.
                headers = {"Authorization": f"Bearer {server.key}"}
                other.get(f"{V1}/events?after=end&wait=0.2&types=node.*", headers=headers)
                yield b"x" * 1000

    with server.client() as http:
        session = answer(http.post(f"{V1}/sessions", json={}), 201)["id"]
        sent = http.put(f"{V1}/sessions/{session}/files/slow", content=slow())
        assert answer(sent, 201)["size"] == pieces * 1000
        answer(http.delete(f"{V1}/sessions/{session}"))


@pytest.mark.parametrize(
    ("flood", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 50_000, b"431"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 1000, b"400"),
    ],
    ids=["header without end", "pipelined requests"],
)
def test_a_flood_on_one_connection_closes_it(flood: bytes, status: bytes, connect: Any) -> None:
    made = connect()
    try:
        made.sendall(flood)
    except (BrokenPipeError, ConnectionResetError):
        return
    received = read_to_close(made)
    assert received == b"" or b"HTTP/1.1 " + status in received


def test_probes_are_answered_while_all_connections_are_busy(server: Server, connect: Any) -> None:
    words = ("key", "create", "reader", "--scope", "read", "--data-dir", str(server.data_dir))
    other = preloaded.run(*words).stdout.split()[-1]
    headers = {"Authorization": f"Bearer {other}"}
    # A running server learns of keys that another process makes within seconds.
    eventually(lambda: httpx.get(f"{server.url}{V1}/sessions", headers=headers).is_success)
    held = []
    for key in (server.key, other):
        for _ in range(LIMIT // 2):
            head = f"GET {V1}/events?after=end&wait=60&types=node.none HTTP/1.1\r\nHost: a\r\n"
            held.append(connect(f"{head}Authorization: Bearer {key}\r\n\r\n".encode()))

    def refused() -> bool:
        found = httpx.get(f"{server.url}{V1}/sessions")
        if found.status_code == 401:
            return False
        problem(found, 503, "too_many_connections")
        assert int(found.headers["retry-after"]) > 0
        return True

    eventually(refused)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    for one in held:
        one.close()
    eventually(lambda: httpx.get(f"{server.url}{V1}/sessions").status_code == 401)


def test_one_key_cannot_occupy_all_requests(server: Server, connect: Any) -> None:
    head = f"GET {V1}/events?after=end&wait=60&types=node.none HTTP/1.1\r\nHost: a\r\n"
    waiting = f"{head}Authorization: Bearer {server.key}\r\n\r\n".encode()
    held = [connect(waiting) for _ in range(LIMIT // 2)]
    with server.client() as http:

        def refused() -> bool:
            found = http.get(f"{V1}/sessions")
            return found.status_code == 429 and found.json()["code"] == "too_many_requests"

        eventually(refused)
        for one in held:
            one.close()
        eventually(lambda: http.get(f"{V1}/sessions").status_code == 200)


class Few(Server):
    """A server with few descriptors, and a few more if it asks for them."""

    prefix = ("prlimit", "--nofile=128:300")


def test_the_descriptor_limit_is_raised_and_half_is_reserved_from_clients(
    bubblewrap: str, tmp_path: Path
) -> None:
    settings = {"ATOLL_POOL__SIZE": "0", "ATOLL_LOCAL__OPEN_FILES": "128"}
    with Few(tmp_path, **settings) as server, ExitStack() as stack:
        assert server.process is not None
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if "open files" in line).split()[3] == (
            "300"
        )
        place = urlsplit(server.url)
        for _ in range(600):
            made = socket.create_connection((place.hostname, place.port), timeout=20)
            stack.callback(made.close)
            made.sendall(HALF)
        with server.client() as http:
            session = answer(http.post(f"{V1}/sessions", json={}), 201)["id"]
            run = http.post(f"{V1}/sessions/{session}/execute", json={"code": "1", "wait": 20})
            assert answer(run, 200)["status"] == "success"
            answer(http.delete(f"{V1}/sessions/{session}"))


LINES = b"a: b\r\n" * 80_000
"""Longer than a header may be, and than one read returns."""


def answered(made: socket.socket) -> bytes:
    """The response to these lines; empty if the connection closes before they are complete."""
    try:
        made.sendall(LINES)
    except (BrokenPipeError, ConnectionResetError):
        return b""
    return read_to_close(made)


@pytest.mark.quick
def test_endless_trailers_are_refused(server: Server, connect: Any) -> None:
    head = (
        f"POST {V1}/sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {server.key}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    made = connect(head.encode() + b"1\r\n{\r\n0\r\n")
    # Not after the time for a body, which would be long and much.
    assert b"request_timeout" not in answered(made)


def test_a_header_behind_a_pending_request_is_bounded_too(server: Server, connect: Any) -> None:
    with server.client() as http:
        session = answer(http.post(f"{V1}/sessions", json={}), 201)["id"]
        body = json.dumps({"code": "import time\ntime.sleep(600)", "wait": 60, "timeout": 60})
        head = (
            f"POST {V1}/sessions/{session}/execute HTTP/1.1\r\nHost: a\r\n"
            f"Authorization: Bearer {server.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        made = connect(head.encode())
        executions = f"{V1}/executions"
        eventually(lambda: answer(http.get(executions, params={"session_id": session}))["items"])
        made.sendall(b"GET /health HTTP/1.1\r\n")
        assert b"request_timeout" not in answered(made)
        http.delete(f"{V1}/sessions/{session}")


def test_two_requests_in_one_write_are_both_answered(server: Server, connect: Any) -> None:
    """The second request does not count as an idle connection, which others could replace."""
    with server.client() as http:
        session = answer(http.post(f"{V1}/sessions", json={}), 201)["id"]
        code = "import time\nopen('begun', 'w')\ntime.sleep(2)\nprint('done')"
        body = json.dumps({"code": code, "wait": 30})
        head = (
            f"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
            f"POST {V1}/sessions/{session}/execute HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            f"Authorization: Bearer {server.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        made = connect(head.encode())
        begun = f"{V1}/sessions/{session}/files/begun"
        eventually(lambda: http.get(begun).is_success)
        held = [connect(HALF) for _ in range(2 * LIMIT)]
        assert b'"stdout":"done\\n"' in read_to_close(made)
        assert held
        http.delete(f"{V1}/sessions/{session}")
