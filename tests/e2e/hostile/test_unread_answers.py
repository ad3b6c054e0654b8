"""Clients that ask for much and read nothing."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from atoll.api.rest.server import http_connections
from tests.e2e.api import V1, Api, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 1024 * 1024
MEMORY = 32 * MiB
CLIENTS = 40
SETTINGS = {
    "ATOLL_POOL__SIZE": "0",
    "ATOLL_CONNECTION__MAX_STREAMS": str(CLIENTS),
    "ATOLL_CONNECTION__ANSWER_MEMORY": str(MEMORY),
}
CONSTANTS = {f"{http_connections.__name__}.WRITE_TIMEOUT": 2.0}
MOST_GROWTH = 8 * MEMORY
"""Without bounds it is more than twice that: twelve megabytes for each client, and its copies."""
CODE = """
import sys
for stream in (sys.stdout, sys.stderr):
    stream.write("\\x01" * (1 << 20))
"""


@pytest.fixture(scope="module")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("unread"), **SETTINGS).with_constants(CONSTANTS) as started:
        yield started


@pytest.fixture(scope="module")
def execution(server: Server) -> Iterator[str]:
    """One whose result is twelve megabytes of JSON."""
    with server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution_id = api.submit(session, CODE)
        assert len(str(api.result(execution_id)["stdout"])) == MiB
        yield execution_id
        api.end(session)


def memory(server: Server) -> int:
    """Resident bytes of the server."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def descriptors(server: Server) -> int:
    assert server.process is not None
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def stuck(server: Server, path: str, body: object = None) -> socket.socket:
    """A connection whose client sends a request and does not read."""
    place = urlsplit(server.url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(20)
    made.connect((place.hostname, place.port))
    method, content = ("GET", "") if body is None else ("POST", json.dumps(body))
    head = f"{method} {V1}{path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {server.key}\r\n"
    length = f"Content-Length: {len(content)}\r\n"
    made.sendall(f"{head}{length}Connection: close\r\n\r\n{content}".encode())
    return made


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/executions/{}/result", marks=pytest.mark.quick),
        "/executions/{}",
        "/executions/{}/events",
    ],
)
def test_unread_responses_use_bounded_memory_and_are_closed(
    server: Server, execution: str, path: str
) -> None:
    with server.client() as http:
        assert http.get("/health").status_code == 200
        before, open_before = memory(server), descriptors(server)
        most = before
        with ExitStack() as stack:
            for _ in range(CLIENTS):
                stack.callback(stuck(server, path.format(execution)).close)

            def connections() -> int:
                nonlocal most
                most = max(most, memory(server))
                return descriptors(server) - open_before

            eventually(lambda: connections() > 1)
            # The server closes them: no client has closed a connection yet.
            eventually(lambda: connections() <= 0)
        assert most - before < MOST_GROWTH
        # A client that reads gets the complete response.
        found = Api(http).result(execution)
        assert found["stdout"] == "\x01" * MiB
        assert found["stderr"] == "\x01" * MiB


def test_a_read_that_exceeds_the_memory_of_responses_is_refused_with_a_code(
    server: Server, execution: str
) -> None:
    with server.client() as http, ExitStack() as stack:
        for _ in range(4):
            stack.callback(stuck(server, f"/executions/{execution}/result").close)

        def refused() -> bool:
            found = http.get(f"{V1}/executions/{execution}/result")
            if found.status_code == 200:
                return False
            problem(found, 503, "too_many_large_answers")
            assert int(found.headers["retry-after"]) > 0
            return True

        eventually(refused)


@pytest.mark.parametrize("route", ["execute", "invoke"])
def test_a_run_without_memory_for_its_result_is_accepted_and_can_be_read_later(
    server: Server, execution: str, route: str
) -> None:
    with server.client() as http, ExitStack() as stack:
        api = Api(http)
        session = api.create()["id"]
        if route == "execute":
            path, body = f"/sessions/{session}/execute", {"code": CODE, "wait": 30}
        else:
            path, body = "/invocations", {"session_id": session, "code": CODE, "mode": "sync"}
        for _ in range(4):
            stack.callback(stuck(server, f"/executions/{execution}/result").close)
        accepted = []

        def is_accepted_without_a_result() -> bool:
            found = http.post(f"{V1}{path}", json=body)
            if found.status_code == 200:
                return False
            assert found.status_code == 202, found.text
            accepted.append(found.json()["execution_id"])
            return True

        eventually(is_accepted_without_a_result)
        # Clients that do not read are disconnected, which frees memory.
        eventually(lambda: http.get(f"{V1}/executions/{accepted[0]}/result").status_code == 200)
        assert api.result(accepted[0])["stdout"] == "\x01" * MiB
        api.end(session)


def test_executions_whose_results_are_not_read_use_bounded_memory(server: Server) -> None:
    with server.client() as http:
        api = Api(http)
        session = api.create(capacity=8)["id"]
        before = most = memory(server)
        open_before = descriptors(server)
        with ExitStack() as stack:
            body = {"code": CODE, "wait": 60}
            for _ in range(CLIENTS):
                stack.callback(stuck(server, f"/sessions/{session}/execute", body).close)

            def connections() -> int:
                nonlocal most
                most = max(most, memory(server))
                return descriptors(server) - open_before

            eventually(lambda: connections() > 1)
            eventually(lambda: connections() <= 1, seconds=90)
        assert most - before < MOST_GROWTH
        api.end(session)


def test_open_streams_of_one_key_are_bounded(server: Server) -> None:
    with server.client() as http, ExitStack() as stack:
        headers = {"Accept": "text/event-stream"}
        for _ in range(CLIENTS // 2):
            stream = http.stream("GET", f"{V1}/events?after=end", headers=headers)
            assert stack.enter_context(stream).status_code == 200
        refused = http.get(f"{V1}/events?after=end", headers=headers)
        problem(refused, 429, "too_many_streams")
        stack.close()
        eventually(lambda: _can_follow(server))


def _can_follow(server: Server) -> bool:
    headers = {"Accept": "text/event-stream"}
    with server.client() as http, http.stream("GET", f"{V1}/events", headers=headers) as stream:
        return stream.status_code == 200
