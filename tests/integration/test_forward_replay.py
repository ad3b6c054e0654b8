"""A request that one node forwarded to another, overheard and sent again."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Self

from tests.e2e.api import V1, eventually
from tests.integration.nodes import Fleet
from tests.integration.replicas import LONG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.nodes import FleetNode


class Tap:
    """Passes on what it gets to a node, and keeps a copy of each connection's requests."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.node: FleetNode | None = None
        self.captured: list[bytearray] = []
        self.change = (b"", b"")
        """What it puts in the place of what, on the way to the node."""
        self._open = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for end in self._open:
            end.close()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=work, args=given, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                far = None if self.node is None else _connected(self.node)
                if far is None:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                self._open.append(far)
                self.captured.append(bytearray())
                data_seen = self.captured[-1]

                def altered(data: bytes, data_seen: bytearray = data_seen) -> bytes:
                    data_seen += data
                    return data.replace(*self.change) if self.change[0] else data

                self._start(_copy, near, far, altered)
                self._start(_copy, far, near, bytes)

    def request(self, start: bytes) -> bytes:
        """The one request that began like this, with its body."""
        (found,) = [
            bytes(request)
            for received in self.captured
            for request in re.split(rb"(?=(?:GET|POST|PUT|DELETE) /)", bytes(received))
            if request.startswith(start)
        ]
        return found


def _connected(node: FleetNode) -> socket.socket | None:
    """Null while the node is down."""
    if not node.url:
        return None
    try:
        return socket.create_connection(("127.0.0.1", int(node.url.rsplit(":", 1)[1])), timeout=30)
    except ConnectionRefusedError:
        return None


def _copy(source: socket.socket, target: socket.socket, altered: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(altered(data))
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _replayed(node: FleetNode, request: bytes) -> tuple[int, bytes]:
    raw = _connected(node)
    assert raw is not None
    with raw:
        raw.sendall(request)
        answer = HTTPResponse(raw)
        answer.begin()
        return answer.status, answer.read()


def test_a_forwarded_request_is_not_answered_twice(bubblewrap: str, tmp_path: Path) -> None:
    with Tap() as tap:
        env = {0: {"ATOLL_NODE__LABELS": '{"place": "0"}', "ATOLL_NODE__URL": tap.url}}
        fleet = Fleet(tmp_path, of_node=lambda number: env.get(number, {}))
        tap.node = fleet[0]
        with fleet:
            api = fleet[1].api
            session = fleet[0].api.create(node_labels={"place": "0"})["id"]
            files = f"{V1}/sessions/{session}/files"
            eventually(lambda: api.http.get(files).is_success, LONG)
            work = {"code": "open('n', 'a').write('x')", "wait": 30}
            assert api.http.post(f"{V1}/sessions/{session}/execute", json=work).is_success
            large = b"y" * 200_000
            assert api.http.put(f"{files}/large", content=large).is_success
            captured = {
                "small": tap.request(b"POST /api/v1/sessions/%b/execute" % session.encode()),
                "large": tap.request(b"PUT /api/v1/sessions/%b/files/large" % session.encode()),
            }
            assert captured["large"].endswith(large)
            captured["another body"] = captured["small"].replace(b"'x'", b"'z'")
            captured["another large body"] = captured["large"].replace(b"yyyy", b"zzzz")
            for again in range(2):
                for name, request in captured.items():
                    status, answer = _replayed(fleet[0], request)
                    assert (status, b"hop_refused" in answer) == (403, True), (name, answer)
                if not again:
                    fleet[0].kill()
                    fleet[0].start()
            # Changed on its way, before the node has seen it.
            eventually(lambda: api.http.get(files).is_success, LONG)
            tap.change = (b"'x'", b"'z'")
            changed = api.http.post(f"{V1}/sessions/{session}/execute", json=work)
            assert (changed.status_code, changed.json()["code"]) == (403, "hop_refused")
            assert fleet[0].api.http.get(f"{files}/n").content == b"x"
            assert fleet[0].api.http.get(f"{files}/large").content == large
