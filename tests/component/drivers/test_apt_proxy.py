"""The mirror, as a build reaches it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local.apt_proxy import AptProxy
from atoll.drivers.shared import package_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

LARGE = bytes(range(256)) * 8192


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("If-Modified-Since")))  # type: ignore[attr-defined]
        port: int = self.server.server_port  # type: ignore[attr-defined]
        status, headers, body = {
            "/debian/large": (200, {}, LARGE),
            "/debian/moved": (302, {"Location": "/debian/large"}, b""),
            "/debian/away": (302, {"Location": "http://elsewhere.example/"}, b""),
            "/debian/round": (302, {"Location": "/debian/round"}, b""),
            "/debian/port": (302, {"Location": f"http://127.0.0.1:{port + 1}/"}, b""),
            "/debian/broken": (503, {}, b"sorry"),
        }.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def upstream() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def response_to(mirror: AptProxy, head: str) -> tuple[int | None, bytes]:
    """Status and body of the answer to one request; no status when there is no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with mirror.serve(listener), asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(f"{head}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
    reported, _, body = answer.partition(b"\r\n\r\n")
    return int(reported.split()[1]) if reported else None, body


async def test_requests_are_forwarded_completely() -> None:
    with upstream() as server:
        mirror = AptProxy([f"http://127.0.0.1:{server.server_port}/debian/"])
        head = "GET /0/large HTTP/1.1\r\nIf-Modified-Since: then\r\nCookie: no"

        assert await response_to(mirror, head) == (200, LARGE)
        assert server.asked == [("/debian/large", "then")]  # type: ignore[attr-defined]
        assert await response_to(mirror, "GET /0/moved HTTP/1.1") == (200, LARGE)
        assert (await response_to(mirror, "GET /0/nothing HTTP/1.1"))[0] == 404
        assert mirror.problem is None


@pytest.mark.parametrize(("path", "status"), [("away", 403), ("port", 403), ("round", 502)])
async def test_no_request_reaches_another_host(path: str, status: int) -> None:
    with upstream() as server:
        mirror = AptProxy([f"http://127.0.0.1:{server.server_port}/debian"])

        assert (await response_to(mirror, f"GET /0/{path} HTTP/1.1"))[0] == status


async def test_an_unavailable_or_failing_mirror_is_recorded(nowhere: str) -> None:
    with upstream() as server:
        mirror = AptProxy([f"http://127.0.0.1:{server.server_port}/debian"])
        assert (await response_to(mirror, "GET /0/broken HTTP/1.1"))[0] == 503
        assert mirror.problem == "127.0.0.1 answered 503"

    mirror = AptProxy([f"{nowhere}/debian"])
    assert (await response_to(mirror, "GET /0/x HTTP/1.1"))[0] == 502
    assert mirror.problem is not None


@pytest.mark.parametrize(
    "head",
    [
        "GET /0/../x HTTP/1.1",
        "GET /0/%2e%2e/x HTTP/1.1",
        "GET /0/a%00b HTTP/1.1",
        "GET /7/x HTTP/1.1",
        "GET /x HTTP/1.1",
        "PUT /0/x HTTP/1.1",
        "CONNECT other:443 HTTP/1.1",
        "GET http://other/ HTTP/1.1",
    ],
)
async def test_other_requests_are_refused(head: str) -> None:
    with upstream() as server:
        mirror = AptProxy([f"http://127.0.0.1:{server.server_port}/debian"])

        assert (await response_to(mirror, head))[0] == 403
        assert server.asked == []  # type: ignore[attr-defined]


async def test_data_that_is_not_http_gets_no_response() -> None:
    with upstream() as server:
        mirror = AptProxy([f"http://127.0.0.1:{server.server_port}/debian"])

        assert await response_to(mirror, "nonsense") == (None, b"")
        assert server.asked == []  # type: ignore[attr-defined]


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_proxy, "READ_TIMEOUT", 0.05)
    mirror = AptProxy([])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with mirror.serve(listener), asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


async def test_a_local_directory_can_be_a_mirror_and_links_out_of_it_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("no")
    top = tmp_path / "debian"
    top.mkdir()
    (top / "file").write_bytes(LARGE)
    (top / "out").symlink_to("../secret")
    mirror = AptProxy([f"file://{top}"])

    assert await response_to(mirror, "GET /0/file HTTP/1.1") == (200, LARGE)
    assert await response_to(mirror, "HEAD /0/file HTTP/1.1") == (200, b"")
    assert (await response_to(mirror, "GET /0/out HTTP/1.1"))[0] == 404
    assert (await response_to(mirror, "GET /0/%2e%2e/secret HTTP/1.1"))[0] == 403
