"""A POST with a key is handled once, even if the connection or the server fails."""

from __future__ import annotations

import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server for one test to kill."""
    with Server(tmp_path, ATOLL_POOL__SIZE="1", ATOLL_SHUTDOWN_TIMEOUT="1") as server:
        yield server


@contextmanager
def calling(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


@pytest.fixture
def key() -> str:
    return str(uuid.uuid4())


def post(api: Api, path: str, key: str, /, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/{path}", json=fields, headers={"Idempotency-Key": key})


def replayed(response: httpx.Response) -> bool:
    return "idempotency-replayed" in response.headers


COUNT = "with open('runs', 'a') as file: file.write('.')\n"


def runs(api: Api, session: str) -> int:
    return len(api.http.get(f"{V1}/sessions/{session}/files/runs").content)


def test_a_session_is_created_once(api: Api, key: str) -> None:
    first = post(api, "sessions", key, timeout=60, env_vars={"MARK": key})
    second = post(api, "sessions", key, timeout=60, env_vars={"MARK": key})

    assert answer(first, 201) == answer(second, 201)
    assert (replayed(first), replayed(second)) == (False, True)
    listed = answer(api.http.get(f"{V1}/sessions?limit=500"))["items"]
    assert [item["id"] for item in listed if item["env_vars"].get("MARK") == key] == [
        first.json()["id"]
    ]
    api.end(first.json()["id"])


@pytest.mark.parametrize("wait", [0, 20], ids=["submitted", "waited for"])
def test_an_execution_is_run_once(api: Api, session: str, key: str, wait: int) -> None:
    path = f"sessions/{session}/execute"
    first = post(api, path, key, code=COUNT, wait=wait)
    execution_id = first.json()["execution_id"]
    result = api.result(execution_id)
    second = post(api, path, key, code=COUNT, wait=wait)

    assert result["status"] == "success"
    assert first.status_code == (200 if wait else 202)
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert replayed(second)
    assert runs(api, session) == 1


def test_an_id_sent_many_times_at_once_is_one_execution(api: Api, session: str) -> None:
    def send(name: str) -> httpx.Response:
        return api.execute(session, code=COUNT, execution_id=name, wait=20)

    names = [f"once-{uuid.uuid4()}" for _ in range(10)]
    with ThreadPoolExecutor(8) as threads:
        for name in names:
            results = [answer(response) for response in threads.map(send, [name] * 8)]
            assert results == [results[0]] * 8
    assert runs(api, session) == len(names)


@pytest.mark.parametrize("prefer", ["wait=20", "respond-async, Wait = 20"])
def test_the_wait_of_a_client_can_be_a_prefer_header(api: Api, session: str, prefer: str) -> None:
    body = {"code": "print(1)"}
    url = f"{V1}/sessions/{session}/execute"
    found = api.http.post(url, json=body, headers={"Prefer": prefer})
    assert (found.status_code, found.json()["stdout"]) == (200, "1\n")


def test_a_repeated_request_does_not_start_a_stopped_session(api: Api, session: str) -> None:
    context = answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)["id"]
    body = {"code": "print(1)", "context_id": context, "execution_id": "in-a-context", "wait": 20}
    url = f"{V1}/sessions/{session}/execute"
    first = answer(api.http.post(url, json=body))
    answer(api.http.post(f"{V1}/sessions/{session}/stop"))
    assert answer(api.http.post(url, json=body)) == first
    assert api.get(session)["status"] == "stopped"


def test_a_large_result_is_replayed(api: Api, session: str, key: str) -> None:
    path, code = f"sessions/{session}/execute", COUNT + "print('x' * 500_000)"
    first, second = (post(api, path, key, code=code, wait=20) for _ in range(2))

    assert len(answer(first)["stdout"]) == 500_001
    assert second.content == first.content
    assert replayed(second)
    assert runs(api, session) == 1


def test_a_key_with_a_different_body_is_refused(api: Api, session: str, key: str) -> None:
    path = f"sessions/{session}/execute"
    answer(post(api, path, key, code=COUNT, wait=20))

    problem(post(api, path, key, code=COUNT + "#", wait=20), 422, "idempotency_key_reused")
    problem(post(api, "sessions", key), 422, "idempotency_key_reused")
    assert runs(api, session) == 1


def test_every_post_accepts_a_key(api: Api, session: str, key: str) -> None:
    api.put(session, "a", b"here")
    template = f"tmpl-{key}"
    requests: list[tuple[str, dict[str, Any]]] = [
        (f"sessions/{session}/files/move", {"source": "a", "target": "b"}),
        (f"sessions/{session}/files/mkdir", {"path": "c", "parents": False}),
        ("templates", {"id": template, "name": "t"}),
        ("templates", {"name": "of no id"}),
    ]
    for number, (path, fields) in enumerate(requests):
        first, second = (post(api, path, f"{key}-{number}", **fields) for _ in range(2))
        assert first.is_success, first.text
        assert second.content == first.content
        assert replayed(second)
        if path == "templates":
            api.http.delete(f"{V1}/templates/{first.json()['id']}")


def test_an_upload_is_stored_once(api: Api, session: str, key: str) -> None:
    url, headers = f"{V1}/sessions/{session}/files/upload?path=big", {"Idempotency-Key": key}
    content = bytes(3_000_000)
    first = api.http.post(url, content=content, headers=headers)
    api.put(session, "big", b"changed since")
    second = api.http.post(url, content=content, headers=headers)
    other = api.http.post(url, content=content[1:], headers=headers)

    assert answer(first, 201) == answer(second, 201)
    problem(other, 422, "idempotency_key_reused")
    assert api.http.get(f"{V1}/sessions/{session}/files/big").content == b"changed since"


def test_a_refusal_is_replayed_too(api: Api, key: str) -> None:
    first, second = (post(api, "sessions/sess_nobody/execute", key, code="1") for _ in range(2))

    problem(first, 404, "session_not_found")
    assert second.content == first.content
    assert replayed(second)


def test_a_repeat_of_a_request_in_progress_is_refused(api: Api, session: str, key: str) -> None:
    path, body = f"sessions/{session}/execute", {"code": COUNT + until("go"), "wait": 20}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, api, path, key, **body)
        eventually(lambda: "runs" in api.names(session))
        second = post(api, path, key, **body)
        problem(second, 409, "idempotency_in_flight")
        assert second.headers["retry-after"] == "1"
        api.put(session, "go")
        result = answer(first.result())
    assert answer(post(api, path, key, **body)) == result
    assert runs(api, session) == 1


def test_a_malformed_key_is_refused(api: Api) -> None:
    problem(post(api, "sessions", "two words"), 422, "bad_idempotency_key")


# The server is killed


def test_the_first_response_outlives_the_server(own: Server, key: str) -> None:
    with calling(own) as api:
        session = answer(post(api, "sessions", f"{key}-0"), 201)
        path = f"sessions/{session['id']}/execute"
        first = answer(post(api, path, key, code=COUNT, wait=20))
    own.stop(signal.SIGKILL)
    own.start()

    with calling(own) as api:
        assert answer(post(api, "sessions", f"{key}-0"), 201) == session
        second = post(api, path, key, code=COUNT, wait=20)
        assert answer(second) == first
        assert replayed(second)
        assert runs(api, session["id"]) == 1


@pytest.mark.slow
def test_a_request_in_progress_when_the_server_died_is_not_run_twice(own: Server, key: str) -> None:
    body = {"code": COUNT + until("go") + "print('done')", "wait": 30}
    with ThreadPoolExecutor(1) as pool, calling(own) as api:
        session = api.create()["id"]
        path = f"sessions/{session}/execute"
        first = pool.submit(post, api, path, key, **body)
        eventually(lambda: "runs" in api.names(session))
        own.stop(signal.SIGKILL)
        assert isinstance(first.exception(), httpx.TransportError)
    own.start()

    with calling(own) as api:
        api.put(session, "go")
        second = post(api, path, key, **body)
        assert answer(second)["stdout"] == "done\n"
        assert not replayed(second)
        assert replayed(post(api, path, key, **body))
        assert runs(api, session) == 1
        listed = answer(api.http.get(f"{V1}/sessions/{session}/executions"))["items"]
        assert [item["id"] for item in listed] == [second.json()["execution_id"]]
