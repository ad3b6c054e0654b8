"""A key that may only read, at the node of a session and at another that passes requests on."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.e2e.console import begin, console
from tests.integration.replicas import LONG
from tests.integration.test_forwarding import SHELL, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

SAFE = ("get", "head", "options")
SECRET = "the-value-of-a-secret"
ENDLESS = ("/events", "/watch")
"""Routes whose responses last as long as the client is connected."""
RECORDS = (
    "templates", "sessions", "executions", "api_keys", "keyed_requests", "webhooks", "properties",
    "template_versions", "checkpoints", "volumes", "events",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("readers")) as pair:
        yield pair


class Environment:
    """One of everything, on node 0, and a key that may only read."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        api = pair[0].api
        self.session = pair.on(0, secrets={"PASSWORD": SECRET})
        api.put(self.session, "file", b"content")
        context = b"context"
        self.digest = hashlib.sha256(context).hexdigest()
        put = api.http.put(f"{V1}/build-contexts/{self.digest}", content=context)
        assert put.status_code == 201, put.text
        hook = {"url": "https://93.184.215.14/secret-path"}
        made = {
            "session_id": self.session,
            "execution_id": api.run(self.session, "print(1)")["execution_id"],
            "context_id": self._made(f"sessions/{self.session}/contexts", {}),
            "template_id": self._made("templates", {"id": "readers", "name": "readers"}),
            "volume_id": self._made("volumes", {"id": "readers", "kind": "local"}),
            "webhook_id": self._made("webhooks", hook),
            "node_id": pair[0].id,
            "runtime_id": "local",
            "digest": self.digest,
            "number": "1",
            "name": "PASSWORD",
            "path": "file",
        }
        self.parameters: dict[str, str] = made
        self.key = pair.command("key", "create", "reader", "--scope", "read").strip()
        self.headers = {"Authorization": f"Bearer {self.key}"}
        for member in pair.nodes:
            self._wait(member.url)

    def _made(self, what: str, body: dict[str, Any]) -> str:
        return str(answer(self.pair[0].api.http.post(f"{V1}/{what}", json=body), 201)["id"])

    def _wait(self, url: str) -> None:
        def counts() -> bool:
            return httpx.get(f"{url}{V1}/sessions", headers=self.headers).status_code == 200

        eventually(counts, LONG)

    def operations(self) -> Iterator[tuple[str, str]]:
        """Every method and path that the API documents."""
        document = answer(self.pair[0].api.http.get("/openapi.json"))
        for template, methods in document["paths"].items():
            path = re.sub(r"\{(\w+)[^}]*\}", self._value, template)
            for method in methods:
                yield method, path

    def _value(self, found: re.Match[str]) -> str:
        return self.parameters.get(found[1], "unknown")

    def records(self) -> dict[str, list[dict[str, Any]]]:
        return {table: self.pair.rows(f"SELECT * FROM {table}") for table in RECORDS}


@pytest.fixture(scope="module")
def environment(pair: Pair) -> Environment:
    return Environment(pair)


@pytest.fixture(params=[0, 1], ids=["own node", "other node"])
def http(
    request: pytest.FixtureRequest, pair: Pair, environment: Environment
) -> Iterator[httpx.Client]:
    url = pair[request.param].url
    with httpx.Client(base_url=url, headers=environment.headers, timeout=60, verify=False) as http:
        yield http


def test_a_read_only_key_changes_nothing_through_any_route(
    environment: Environment, http: httpx.Client
) -> None:
    before = environment.records()
    tried = set()
    for method, path in environment.operations():
        if path.startswith(f"{V1}/signed/"):
            continue  # They need no key.
        for other in {method, "post", "put", "patch", "delete", "propfind", "trace"}:
            if other in SAFE or (other, path) in tried:
                continue
            tried.add((other, path))
            refused = http.request(other.upper(), path, json={})
            if path.startswith(V1):
                problem(refused, 403, "key_read_only")
            else:
                assert refused.status_code in (403, 405), f"{other} {path}: {refused.text}"
        if method == "get" and not path.endswith(ENDLESS):
            for headers in (
                {},
                {"X-HTTP-Method-Override": "DELETE", "X-Method-Override": "DELETE"},
                {"X-HTTP-Method": "DELETE", "Content-Type": "application/x-www-form-urlencoded"},
            ):
                read = http.request(
                    "GET", path, headers=headers, params={"_method": "DELETE"}, content=b"{}"
                )
                assert read.status_code < 500, f"{path}: {read.text}"
                assert SECRET not in read.text
                assert "secret-path" not in read.text
            for safe in ("HEAD", "OPTIONS"):
                assert http.request(safe, path).status_code < 500
    assert len(tried) > 150
    assert environment.records() == before


def test_a_key_is_accepted_only_where_it_is_documented(
    environment: Environment, http: httpx.Client
) -> None:
    full = environment.pair.key
    url = f"{V1}/sessions/{environment.session}"
    del http.headers["Authorization"]
    for key, name in itertools.product((full, environment.key), ("key", "api_key", "access_token")):
        for options in (
            {"params": {name: key}},
            {"headers": {"Cookie": f"{name}={key}"}},
            {"headers": {"Cookie": f"Authorization=Bearer {key}"}},
            {"headers": {"X-API-Key": key, "X-Authorization": f"Bearer {key}"}},
            {"headers": {"Proxy-Authorization": f"Bearer {key}"}},
            {"headers": {"Authorization": f"Basic {key}"}},
            {"headers": {"Authorization": key}},
            {"headers": {"Sec-WebSocket-Protocol": f"atoll.key.{key}"}},
        ):
            refused: dict[str, Any] = dict(options)
            problem(http.request("GET", url, **refused), 401, "key_missing")
    # Nor is one key taken and another one passed on.
    both = [("Authorization", f"Bearer {full}"), ("Authorization", f"Bearer {environment.key}")]
    for headers in (both, both[::-1]):
        given = httpx.Headers(headers)
        problem(http.delete(f"{url}/files/file", headers=given), 401, "key_ambiguous")
    dropped = {
        "Authorization": f"Bearer {environment.key}",
        "Connection": "authorization, atoll-hop",
    }
    assert http.put(f"{url}/files/file", headers=dropped, content=b"x").status_code == 403


def test_internal_routes_accept_no_api_key(environment: Environment, http: httpx.Client) -> None:
    execution = environment.parameters["execution_id"]
    paths = [
        f"/internal/instances/{environment.pair[0].api.get(environment.session)['container_id']}/ready",
        f"/internal/executions/{execution}/status",
        f"/internal/executions/{execution}/heartbeat",
        f"/internal/executions/{execution}/result",
        "/internal/node",
    ]
    for key, path in itertools.product((environment.key, environment.pair.key), paths):
        for method in ("GET", "POST", "PUT", "DELETE"):
            refused = http.request(
                method, path, headers={"Authorization": f"Bearer {key}"}, json={"result": {}}
            )
            assert refused.status_code in (401, 403, 404, 405), f"{method} {path}: {refused.text}"
    forged = {"Atoll-Hop": "http." + environment.pair[1].id + ".0.00"}
    refused = http.get(f"{V1}/sessions/{environment.session}/files/file", headers=forged)
    assert refused.status_code in (401, 403), refused.text


def test_a_read_only_key_can_watch_a_console_but_not_type(
    environment: Environment, http: httpx.Client
) -> None:
    api = environment.pair[0].api
    execution = begin(api, environment.session, command=["cat"], terminal=SHELL)
    try:
        with console(Api(http), execution) as watching:
            watching.wait(
                lambda: watching.statuses and watching.statuses[-1]["status"] == "running"
            )
            for message in (
                {"type": "stdin", "data": "typed"},
                {"type": "signal", "signal": "SIGKILL"},
                {"type": "close", "end": True},
            ):
                count = len(watching.errors)
                watching.send_message(**message)
                watching.wait(lambda count=count: len(watching.errors) > count)  # type: ignore[misc]
            assert json.dumps(watching.errors).count("key_read_only") == 3, watching.errors
            assert b"typed" not in watching.output
        assert api.status(execution) == "running"
    finally:
        api.http.post(f"{V1}/executions/{execution}/cancel")


def test_a_read_only_key_does_not_start_a_stopped_session(
    environment: Environment, http: httpx.Client
) -> None:
    api = environment.pair[0].api
    session = environment.pair.on(0)
    api.put(session, "file", b"content")
    answer(api.http.post(f"{V1}/sessions/{session}/stop"))
    eventually(lambda: api.get(session)["status"] == "stopped", LONG)
    for path in ("files", "files/file", "files/search?query=x", "files/watch", "processes"):
        read = http.get(f"{V1}/sessions/{session}/{path}", headers={"Accept": "text/event-stream"})
        problem(read, 409, "session_not_running")
    assert api.get(session)["wanted"] == "stopped"
    assert api.get(session)["status"] == "stopped"
