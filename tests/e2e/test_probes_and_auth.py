"""Authentication, limits of request bodies, and routes without a key."""

from __future__ import annotations

import re
import socket
import sqlite3
import stat
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import preloaded
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def stranger(server: Server) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


# Probes


def test_health_checks_need_no_key(stranger: httpx.Client) -> None:
    assert answer(stranger.get("/health"))["status"] == "ok"
    assert answer(stranger.get("/ready"))["status"] == "ready"
    assert stranger.get("/docs").status_code == 200
    assert answer(stranger.get("/openapi.json"))["info"]["title"] == "Atoll"


def samples(api: Api) -> dict[tuple[str, str], float]:
    response = api.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def test_metrics_count_sessions_and_executions(api: Api) -> None:
    before = samples(api)
    session = api.create()["id"]
    api.run(session, "print(1)")
    api.run(session, "raise SystemExit(1)")
    after = samples(api)
    api.end(session)

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    assert (
        grown("atoll_sessions_created_total", "pool")
        + grown("atoll_sessions_created_total", "cold")
        == 1
    )
    assert grown("atoll_sessions_live") == 1
    assert after["atoll_nodes", "false,healthy"] == 1
    assert grown("atoll_executions_total", "completed") == 1
    assert grown("atoll_executions_total", "failed") == 1
    assert grown("atoll_execution_seconds_total") > 0
    assert ("atoll_pool_ready", "python") in after


# Keys


def test_a_probe_of_another_node_needs_a_token(stranger: httpx.Client) -> None:
    problem(stranger.get("/internal/node"), 401, "token_missing")
    for token in ("x", "1.2", stranger.headers.get("authorization", "key")):
        headers = {"Authorization": f"Bearer {token}"}
        problem(stranger.get("/internal/node", headers=headers), 401, "token_unknown")


PATHS = [
    ("GET", "/metrics"),
    ("GET", f"{V1}/sessions"),
    ("POST", f"{V1}/sessions"),
    ("GET", f"{V1}/sessions/x"),
    ("DELETE", f"{V1}/sessions/x"),
    ("POST", f"{V1}/sessions/x/execute"),
    ("GET", f"{V1}/sessions/x/executions"),
    ("GET", f"{V1}/executions/x"),
    ("GET", f"{V1}/executions/x/result"),
    ("GET", f"{V1}/executions/x/events"),
    ("POST", f"{V1}/executions/x/cancel"),
    ("GET", f"{V1}/sessions/x/files"),
    ("PUT", f"{V1}/sessions/x/files/y"),
    ("POST", f"{V1}/sessions/x/files/upload"),
    ("GET", f"{V1}/templates"),
    ("GET", f"{V1}/runtimes"),
    ("GET", f"{V1}/nodes"),
    ("POST", f"{V1}/nodes/local/cordon"),
    ("POST", f"{V1}/nodes/local/drain"),
    ("DELETE", f"{V1}/nodes/local"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.mark.parametrize(("method", "path"), PATHS, ids=[" ".join(pair) for pair in PATHS])
def test_all_other_routes_need_a_key(stranger: httpx.Client, method: str, path: str) -> None:
    response = stranger.request(method, f"{stranger.base_url}".rstrip("/") + path)

    problem(response, 401, "key_missing")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Bearer wrong", "key_unknown"),
        ("Bearer", "key_missing"),
        ("Basic dXNlcjpwYXNz", "key_missing"),
        ("Bearer \xff\xfe", "key_unknown"),
        ("Bearer " + "x" * 5000, "key_unknown"),
    ],
    ids=["wrong", "no key", "basic", "bytes", "long"],
)
def test_an_invalid_key_is_refused(stranger: httpx.Client, header: str, code: str) -> None:
    response = stranger.get(
        f"{V1}/sessions", headers=[(b"Authorization", header.encode("latin-1"))]
    )

    problem(response, 401, code)
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_scheme_bearer_is_case_insensitive(stranger: httpx.Client, server: Server) -> None:
    headers = {"Authorization": f"bearer {server.key}"}

    assert stranger.get(f"{V1}/sessions", headers=headers).status_code == 200


def test_a_read_only_key_can_read_but_not_change(
    server: Server, stranger: httpx.Client, session: str
) -> None:
    made = preloaded.run(
        "key", "create", "reader", "--scope", "read", "--data-dir", str(server.data_dir)
    )
    assert made.returncode == 0, made.stderr
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    url = f"{V1}/sessions/{session}"
    # A running server accepts keys created by another process within seconds.
    eventually(lambda: stranger.get(url, headers=headers).status_code == 200)

    assert stranger.get(f"{url}/files", headers=headers).status_code == 200
    for method, path in (
        ("POST", f"{V1}/sessions"),
        ("POST", f"{url}/execute"),
        ("PUT", f"{url}/files/x"),
        ("DELETE", f"{url}/files/x"),
        ("DELETE", url),
        ("POST", f"{V1}/templates"),
    ):
        response = stranger.request(method, path, headers=headers)
        problem(response, 403, "key_read_only")
    answered = stranger.get(url, headers=headers)
    assert answered.json()["status"] == "running"


@pytest.mark.slow
def test_a_removed_key_is_refused(server: Server, stranger: httpx.Client) -> None:
    directory = ("--data-dir", str(server.data_dir))
    secret = preloaded.run("key", "create", "brief", *directory).stdout.strip()
    headers = {"Authorization": f"Bearer {secret}"}
    eventually(lambda: stranger.get(f"{V1}/sessions", headers=headers).status_code == 200)
    found = re.search(r"(key_\w+)\s+brief", preloaded.run("key", "list", *directory).stdout)
    assert found is not None
    assert preloaded.run("key", "rm", found[1], *directory).returncode == 0

    eventually(lambda: stranger.get(f"{V1}/sessions", headers=headers).status_code == 401)


def test_the_key_file_is_private_and_the_key_is_stored_hashed(server: Server) -> None:
    key = server.data_dir / "key"

    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    with closing(sqlite3.connect(server.data_dir / "atoll.db")) as database:
        database.execute("PRAGMA wal_checkpoint")
    for file in server.data_dir.glob("atoll.db*"):
        assert server.key.encode() not in file.read_bytes()


def test_the_key_is_in_no_response_and_no_log(server: Server, api: Api) -> None:
    with server.client() as http:
        http.get(f"{V1}/nowhere")
        http.post(f"{V1}/sessions", content=b"{")

    assert server.key not in server.stderr()


def test_the_key_of_the_environment_becomes_the_first_key(bubblewrap: str, tmp_path: Path) -> None:
    secret = "a-key-of-my-own-choice"
    with Server(tmp_path, ATOLL_API_KEY=secret) as server:
        assert not (tmp_path / "key").exists()
        with httpx.Client(base_url=server.url, timeout=60) as http:
            headers = {"Authorization": f"Bearer {secret}"}
            assert http.get(f"{V1}/sessions", headers=headers).status_code == 200
            problem(http.get(f"{V1}/sessions"), 401, "key_missing")


# Bodies


def raw(server: Server, head: str, body: bytes) -> bytes:
    """The response on a plain connection."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as line:
        line.sendall(f"{head}\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n".encode() + body)
        reply = b""
        while not reply.endswith(b"}"):
            piece = line.recv(65536)
            assert piece, reply
            reply += piece
        return reply


@pytest.mark.parametrize(
    "path", ["/sessions", "/templates", "/sessions/sess_nobody/execute"], ids=str
)
def test_a_body_announced_as_too_large_is_refused_at_once(server: Server, path: str) -> None:
    reply = raw(server, f"POST {V1}{path} HTTP/1.1", b"Content-Length: 9000000\r\n\r\n")

    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b'"code": "body_too_large"' in reply


@pytest.mark.parametrize(
    "path", ["/sessions", "/templates", "/sessions/sess_nobody/execute"], ids=str
)
def test_a_body_that_grows_too_large_is_refused(api: Api, path: str) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"name": "'
        for _ in range(9):
            yield b"x" * 2**20

    headers = {"Content-Type": "application/json"}
    response = api.http.post(f"{V1}{path}", content=endless(), headers=headers)

    problem(response, 413, "body_too_large")


def test_an_upload_has_its_own_limit(bubblewrap: str, tmp_path: Path) -> None:
    with (
        Server(tmp_path, ATOLL_MAX_UPLOAD="100000", ATOLL_MAX_BODY="2000") as server,
        server.client() as http,
    ):
        api = Api(http)
        session = api.create()["id"]
        assert api.put(session, "fits", b"x" * 100_000)["size"] == 100_000
        url = f"{V1}/sessions/{session}/files/large"
        problem(http.put(url, content=b"x" * 100_001), 413, "body_too_large")
        blocks = (b"x" * 60_000 for _ in range(2))
        problem(http.put(url, content=blocks), 413, "body_too_large")
        files = [("file", ("large", b"x" * 100_000))]
        upload = f"{V1}/sessions/{session}/files/upload"
        problem(http.post(upload, files=files), 413, "body_too_large")
        problem(api.execute(session, code="#" * 2000), 413, "body_too_large")
        assert api.names(session) == ["fits"]
        assert api.run(session, "print(1)")["status"] == "success"


@pytest.mark.parametrize(
    "content", [b"{", b"{'a': 1}", b"nonsense", b"\xff"], ids=["cut", "quotes", "word", "bytes"]
)
@pytest.mark.parametrize("path", ["/sessions", "/templates"], ids=str)
def test_a_body_that_is_not_json_is_refused(api: Api, path: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = api.http.post(f"{V1}{path}", content=content, headers=headers)

    problem(response, 400, "bad_json")


def test_values_of_a_refused_body_are_not_returned(api: Api) -> None:
    body: dict[str, Any] = {"env_vars": {"TOKEN": {"secret": "hunter2"}}, "colour": "hunter2"}
    response = api.http.post(f"{V1}/sessions", json=body)

    problem(response, 422, "invalid_request")
    assert "hunter2" not in response.text


def test_unknown_routes_and_methods_are_reported_as_problems(api: Api) -> None:
    problem(api.http.get(f"{V1}/nowhere"), 404, "not_found")
    response = api.http.patch(f"{V1}/sessions")
    problem(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"] or "GET" in response.headers["allow"]


# Browsers


def test_pages_of_other_origins_are_refused(api: Api, stranger: httpx.Client) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answers = [
        api.http.get(f"{V1}/sessions", headers=headers),
        api.http.options(f"{V1}/sessions", headers=headers),
        stranger.options(f"{V1}/sessions", headers=headers),
        stranger.get("/health", headers=headers),
    ]

    for response in answers:
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_configured_origin_is_allowed(bubblewrap: str, tmp_path: Path) -> None:
    friend = "https://friend.example"
    with (
        Server(tmp_path, ATOLL_CORS_ORIGINS=friend) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        asked = {"Access-Control-Request-Method": "POST"}
        preflight = http.options(f"{V1}/sessions", headers={"Origin": friend, **asked})
        refused = http.options(f"{V1}/sessions", headers={"Origin": "https://x.example", **asked})

        assert preflight.headers["access-control-allow-origin"] == friend
        assert "access-control-allow-origin" not in refused.headers


# Where it listens


def test_the_server_does_not_listen_beyond_loopback_without_tls(tmp_path: Path) -> None:
    done = preloaded.run("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path))

    assert done.returncode != 0
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_server_listens_beyond_loopback_on_request(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, "--host", "0.0.0.0", "--insecure") as server:
        port = urlsplit(server.url).port
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200


def test_a_port_in_use_is_reported(server: Server, tmp_path: Path) -> None:
    port = urlsplit(server.url).port
    done = preloaded.run("serve", "--port", str(port), "--data-dir", str(tmp_path))

    assert done.returncode != 0
    assert f"127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_directory_in_use_is_reported(server: Server, api: Api) -> None:
    done = preloaded.run("serve", "--port", "0", "--data-dir", str(server.data_dir))

    assert done.returncode != 0
    assert str(server.data_dir) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_setting_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_PROT", "8000")
    done = preloaded.run("serve", "--data-dir", str(tmp_path))

    assert done.returncode != 0
    assert "ATOLL_PROT" in done.stderr


def test_the_command_printed_at_the_start_works(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        assert server.process is not None
        assert server.process.stdout is not None
        line = ""
        while "curl" not in line:
            line = server.process.stdout.readline()
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True
        )

        assert '"status":"running"' in done.stdout
