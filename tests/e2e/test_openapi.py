"""The OpenAPI document is complete and true, and no request breaks the server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.e2e.api import V1, Api, answer, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

METHODS = {"get", "put", "post", "delete", "patch"}
ROUTES = {
    f"GET {V1}/sessions/{{session_id}}/checkpoint",
    f"POST {V1}/sessions/{{session_id}}/checkpoint",
    f"GET {V1}/sessions", f"POST {V1}/sessions", f"GET {V1}/sessions/{{session_id}}",
    f"PATCH {V1}/sessions/{{session_id}}", f"POST {V1}/sessions/{{session_id}}/clone",
    f"POST {V1}/sessions/{{session_id}}/start", f"POST {V1}/sessions/{{session_id}}/stop",
    f"POST {V1}/sessions/{{session_id}}/pause", f"POST {V1}/sessions/{{session_id}}/resume",
    f"POST {V1}/sessions/{{session_id}}/archive",
    f"DELETE {V1}/sessions/{{session_id}}", f"POST {V1}/sessions/{{session_id}}/execute",
    f"GET {V1}/sessions/{{session_id}}/executions", f"GET {V1}/executions/{{execution_id}}",
    f"GET {V1}/executions/{{execution_id}}/status", f"GET {V1}/executions/{{execution_id}}/result",
    f"GET {V1}/executions/{{execution_id}}/events", f"POST {V1}/executions/{{execution_id}}/cancel",
    f"GET {V1}/sessions/{{session_id}}/files", f"POST {V1}/sessions/{{session_id}}/files/upload",
    f"POST {V1}/sessions/{{session_id}}/files/mkdir",
    f"POST {V1}/sessions/{{session_id}}/files/copy",
    f"POST {V1}/sessions/{{session_id}}/files/chmod",
    f"POST {V1}/sessions/{{session_id}}/files/presign",
    f"GET {V1}/sessions/{{session_id}}/files/search",
    f"GET {V1}/sessions/{{session_id}}/files/watch",
    f"GET {V1}/sessions/{{session_id}}/artifacts",
    f"GET {V1}/executions/{{execution_id}}/artifacts",
    f"GET {V1}/signed/{{token}}", f"PUT {V1}/signed/{{token}}", f"POST {V1}/signed/{{token}}",
    f"GET {V1}/sessions/{{session_id}}/contexts", f"POST {V1}/sessions/{{session_id}}/contexts",
    f"GET {V1}/sessions/{{session_id}}/contexts/{{context_id}}",
    f"DELETE {V1}/sessions/{{session_id}}/contexts/{{context_id}}",
    f"POST {V1}/sessions/{{session_id}}/contexts/{{context_id}}/restart",
    f"POST {V1}/sessions/{{session_id}}/contexts/{{context_id}}/interrupt",
    f"GET {V1}/sessions/{{session_id}}/dependencies",
    f"POST {V1}/sessions/{{session_id}}/dependencies",
    f"GET {V1}/sessions/{{session_id}}/dependencies/log",
    f"GET {V1}/sessions/{{session_id}}/processes",
    f"DELETE {V1}/sessions/{{session_id}}/processes",
    f"POST {V1}/sessions/{{session_id}}/files/move",
    f"GET {V1}/sessions/{{session_id}}/files/{{path}}",
    f"PUT {V1}/sessions/{{session_id}}/files/{{path}}",
    f"DELETE {V1}/sessions/{{session_id}}/files/{{path}}", f"GET {V1}/templates",
    f"POST {V1}/templates", f"GET {V1}/templates/{{template_id}}",
    f"PUT {V1}/templates/{{template_id}}", f"DELETE {V1}/templates/{{template_id}}",
    f"GET {V1}/templates/{{template_id}}/versions",
    f"GET {V1}/templates/{{template_id}}/versions/{{number}}",
    f"GET {V1}/templates/{{template_id}}/log", f"POST {V1}/templates/{{template_id}}/build",
    f"GET {V1}/build-contexts/{{digest}}", f"PUT {V1}/build-contexts/{{digest}}",
    f"GET {V1}/pools", f"GET {V1}/runtimes", f"GET {V1}/runtimes/{{runtime_id}}/health",
    f"GET {V1}/runtimes/{{runtime_id}}/metrics", "GET /health", "GET /ready", "GET /metrics",
    f"GET {V1}/executions", f"POST {V1}/executions/{{execution_id}}/inject",
    f"POST {V1}/executions/{{execution_id}}/resume", f"GET {V1}/invocations",
    f"POST {V1}/invocations", f"GET {V1}/invocations/{{invocation_id}}",
    f"GET {V1}/invocations/{{invocation_id}}/executions",
    f"POST {V1}/invocations/{{invocation_id}}/cancel",
    f"GET {V1}/sessions/{{session_id}}/secrets",
    f"PUT {V1}/sessions/{{session_id}}/secrets/{{name}}",
    f"DELETE {V1}/sessions/{{session_id}}/secrets/{{name}}",
    f"GET {V1}/nodes", f"GET {V1}/nodes/{{node_id}}", f"DELETE {V1}/nodes/{{node_id}}",
    f"POST {V1}/nodes/{{node_id}}/cordon", f"POST {V1}/nodes/{{node_id}}/uncordon",
    f"POST {V1}/nodes/{{node_id}}/drain",
    f"GET {V1}/volumes", f"POST {V1}/volumes", f"GET {V1}/volumes/{{volume_id}}",
    f"DELETE {V1}/volumes/{{volume_id}}",
    f"GET {V1}/events", f"GET {V1}/webhooks", f"POST {V1}/webhooks",
    f"GET {V1}/webhooks/{{webhook_id}}", f"PATCH {V1}/webhooks/{{webhook_id}}",
    f"DELETE {V1}/webhooks/{{webhook_id}}", f"POST {V1}/webhooks/{{webhook_id}}/test",
}  # fmt: skip


@pytest.fixture(scope="module")
def described(api: Api) -> dict[str, Any]:
    return answer(api.http.get("/openapi.json"))


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield method, path, operation


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_the_document_describes_every_route_and_no_other(described: dict[str, Any]) -> None:
    found = {f"{method.upper()} {path}" for method, path, _ in operations(described)}

    assert described["openapi"].startswith("3.")
    assert found == ROUTES


def test_every_route_describes_its_responses(described: dict[str, Any]) -> None:
    for method, path, operation in operations(described):
        answers = operation["responses"]
        good = [status for status in answers if status.startswith("2")]
        assert good, f"{method} {path}"
        content = answers["default"]["content"]
        assert list(content) == ["application/problem+json"], f"{method} {path}"
        assert "422" not in answers, f"{method} {path}"
        for status in good:
            if path.startswith(V1) and status != "204":
                media_type = next(iter(answers[status]["content"].values()), None)
                assert media_type is not None, f"{method} {path} {status}"
                if "application/json" in answers[status]["content"]:
                    media_type = answers[status]["content"]["application/json"]
                    assert media_type.get("schema"), f"{method} {path} {status}"


def test_every_route_has_a_unique_id_and_its_parameters(described: dict[str, Any]) -> None:
    seen = []
    for method, path, operation in operations(described):
        seen.append(operation["operationId"])
        named = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
        wanted = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        assert named == wanted, f"{method} {path}"

    assert len(seen) == len(set(seen))


def test_every_post_and_no_other_method_takes_an_idempotency_key(
    described: dict[str, Any],
) -> None:
    for method, path, operation in operations(described):
        headers = [item["name"] for item in operation.get("parameters", ())]
        keyed = method == "post" and "/signed/" not in path
        assert ("Idempotency-Key" in headers) == keyed, f"{method} {path}"


def test_every_reference_resolves(described: dict[str, Any]) -> None:
    for reference in references(described):
        place: Any = described
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert isinstance(place, dict)


def test_authentication_is_described(described: dict[str, Any]) -> None:
    assert described["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert described["security"] == [{"key": []}]


def test_responses_have_the_documented_fields(
    api: Api, session: str, described: dict[str, Any]
) -> None:
    execution_id = api.run(session, "open('a', 'w').close()")["execution_id"]
    submitted = answer(api.execute(session, code="1"), 202)
    body = {"session_id": session, "code": "pass"}
    found = {
        "InvocationOut": answer(api.http.post(f"{V1}/invocations", json=body)),
        "InvocationPage": answer(api.http.get(f"{V1}/invocations")),
        "AttemptOut": api.execution(execution_id)["attempts"][0],
        "SessionOut": api.get(session),
        "Submitted": submitted,
        "ResultOut": api.result(execution_id),
        "MetricsOut": api.result(execution_id)["metrics"],
        "StatusOut": answer(api.http.get(f"{V1}/executions/{execution_id}/status")),
        "ExecutionOut": api.execution(execution_id),
        "ArtifactOut": api.execution(execution_id)["artifacts"][0],
        "ArtifactPage": answer(api.http.get(f"{V1}/sessions/{session}/artifacts")),
        "SessionArtifactOut": answer(api.http.get(f"{V1}/sessions/{session}/artifacts"))["items"][
            0
        ],
        "LinkOut": answer(
            api.http.post(f"{V1}/sessions/{session}/files/presign", json={"path": "a"})
        ),
        "MatchPage": answer(api.http.get(f"{V1}/sessions/{session}/files/search?query=x")),
        "EntryPage": answer(api.http.get(f"{V1}/sessions/{session}/files")),
        "EntryOut": answer(api.http.get(f"{V1}/sessions/{session}/files"))["items"][0],
        "TemplateOut": answer(api.http.get(f"{V1}/templates/python")),
        "NodePage": answer(api.http.get(f"{V1}/nodes")),
        "NodeOut": answer(api.http.get(f"{V1}/nodes/local")),
        "PoolPage": answer(api.http.get(f"{V1}/pools")),
        "RuntimePage": answer(api.http.get(f"{V1}/runtimes")),
        "RuntimeOut": answer(api.http.get(f"{V1}/runtimes"))["items"][0],
        "RuntimeHealth": answer(api.http.get(f"{V1}/runtimes/local/health")),
        "RuntimeMetrics": answer(api.http.get(f"{V1}/runtimes/local/metrics")),
        "Problem": api.http.get(f"{V1}/sessions/nobody").json(),
    }

    schemas = described["components"]["schemas"]
    for name, content in found.items():
        # Present only while the database is unavailable.
        assert set(content) == set(schemas[name]["properties"]) - {"stale"}, name
    problems = schemas["Problem"]["properties"]
    assert set(problems) == {"type", "title", "status", "detail", "code"}


# Any body at all


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with some of these fields, each right or anything."""
    optional = {name: strategy | JSON for name, strategy in fields.items()}
    return st.fixed_dictionaries({}, optional=optional) | JSON


SESSIONS = objects(
    template_id=st.sampled_from(["python", "nothing", ""]),
    # Never a valid body: each session is a process on this machine.
    timeout=st.integers(max_value=0) | st.integers(min_value=10**6),
    cpu=st.text(max_size=8),
    memory=st.from_regex(r"[0-9]{1,20}([KMGT]i?)?", fullmatch=True),
    env_vars=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    resources=JSON,
    other=JSON,
)
EXECUTIONS = objects(
    code=st.sampled_from(["pass", "def handler(event): return event", "print(1)"]),
    language=st.sampled_from(["python", "shell", "javascript", "cobol"]),
    command=st.lists(st.text(max_size=5), max_size=3),
    timeout=st.floats(max_value=2),
    event=JSON,
    stdin=st.text(max_size=20),
    env=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    args=st.lists(st.text(max_size=5), max_size=3),
    cwd=st.text(max_size=8),
    wait=st.floats(max_value=5),
)

IDS = st.sampled_from(["mine", "exec_nobody", "", "../x", "a\n"])
INVOCATIONS = objects(
    function_name=st.sampled_from(["f", "handler", "json:dumps", "nothing:here", "a:b:c", ""]),
    code=st.sampled_from(["pass", "def f(event): return event", "print(input())"]),
    language=st.sampled_from(["python", "shell", "cobol"]),
    command=st.lists(st.text(max_size=5), max_size=3),
    mode=st.sampled_from(["sync", "async", "stream", "console", "later"]),
    # Never an existing execution: its response would not depend on the body.
    invocation_id=IDS.filter(lambda text: text != "mine"),
    timeout_ms=st.integers(max_value=2000),
    wait_ms=st.integers(max_value=5000),
    input=JSON,
    input_base64=st.text(st.sampled_from("eA=%\n"), max_size=6),
    content_type=st.text(max_size=8),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | JSON, max_size=3),
    stdin=st.text(max_size=20),
    stdin_open=st.booleans(),
    context_id=IDS,
    terminal=objects(rows=st.integers(), cols=st.integers()),
    env=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    cwd=st.text(max_size=8),
)
INJECTIONS = objects(
    message=st.text(max_size=20),
    stdin=st.text(max_size=20),
    stdin_base64=st.text(st.sampled_from("eA=%\n"), max_size=6),
    eof=st.booleans(),
)
RESUMPTIONS = objects(
    approved=st.booleans(), answer=JSON, reason=st.text(max_size=20), approval_id=IDS
)
CANCELLATIONS = objects(reason=st.text(max_size=20))

FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@FUZZ
@given(body=SESSIONS)
@example(body={"\ud800": 1})
@example(body={"env_vars": {"A": "\ud800"}, "timeout": 0})
@example(body={"timeout": 10**400})
@example(body={"timeout": float("inf")})
@example(body={"memory": "9" * 15 + "." + "9" * 6 + "Ti"})
def test_no_body_breaks_the_creation_of_a_session(api: Api, body: Any) -> None:
    response = api.http.post(f"{V1}/sessions", content=json.dumps(body))

    assert response.status_code < 500, response.text
    assert response.status_code == 201 or response.json()["code"]
    if response.status_code == 201:
        api.end(response.json()["id"])


@FUZZ
@given(body=EXECUTIONS)
@example(body={"code": "pass", "event": float("nan"), "wait": 5})
@example(body={"code": "pass", "event": "\ud800", "wait": 5})
@example(body={"code": "\ud800", "wait": 5})
@example(body={"code": "pass", "event": 10**4000, "wait": 5})
@example(body={"code": "pass", "timeout": float("inf")})
@example(body={"code": "pass", "timeout": 1e-300, "wait": 5})
@example(body={"code": "pass", "wait": float("inf")})
@example(body={"code": "pass\0", "wait": 5})
@example(body={"code": "pass", "language": "shell", "env": {"PATH": ""}, "wait": 5})
@example(body={"command": [""], "wait": 5})
@example(body={"code": "pass", "cwd": "x" * 4096, "wait": 5})
def test_no_body_breaks_an_execution(api: Api, fuzzed: str, body: Any) -> None:
    response = api.http.post(f"{V1}/sessions/{fuzzed}/execute", content=json.dumps(body))

    assert response.status_code < 500, response.text
    if response.status_code == 202:
        api.result(response.json()["execution_id"])
    elif response.status_code == 200:
        assert response.json()["status"] in ("success", "failed", "timeout")
    else:
        assert response.json()["code"]


@FUZZ
@given(body=INVOCATIONS)
@example(body={"code": "def handler(event): return event", "input": "\ud800"})
@example(body={"code": "pass", "metadata": {"\ud800": "\udfff"}})
@example(body={"code": "pass", "metadata": {"a": "\0"}})
@example(body={"code": "pass", "invocation_id": "\ud800"})
@example(body={"code": "pass", "content_type": "\ud800", "input": 1})
@example(body={"code": "pass", "input": 10**4000})
@example(body={"code": "pass", "timeout_ms": 10**400})
@example(body={"code": "pass", "wait_ms": 10**400})
@example(body={"code": "pass", "terminal": {"rows": 10**30}})
@example(body={"command": ["cat"], "input": ["\ud800"]})
def test_no_body_breaks_an_invocation(api: Api, fuzzed: str, body: Any) -> None:
    if isinstance(body, dict):
        body = {"timeout_ms": 2000, **body, "session_id": fuzzed}
    content = json.dumps(body)
    with api.http.stream("POST", f"{V1}/invocations", content=content) as response:
        response.read()
    assert response.status_code < 500, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.startswith("event: accepted\n")
        assert response.text.count("event: result\n") == 1
        return
    fields = response.json()
    if response.status_code == 202:
        api.result(fields["execution_id"])
    elif response.status_code == 200:
        assert fields["status"] in ("succeeded", "failed")
    else:
        assert fields["code"]


@FUZZ
@given(injection=INJECTIONS, resumption=RESUMPTIONS, cancellation=CANCELLATIONS)
@example(injection={"message": "\ud800"}, resumption={}, cancellation={"reason": "\ud800"})
@example(
    injection={"stdin": "\ud800"},
    resumption={"approved": True, "answer": "\ud800"},
    cancellation={},
)
def test_no_body_breaks_a_conversation(
    api: Api, listening: str, injection: Any, resumption: Any, cancellation: Any
) -> None:
    for verb, body in (("inject", injection), ("resume", resumption)):
        for execution_id in (listening, "exec_nobody"):
            url = f"{V1}/executions/{execution_id}/{verb}"
            response = api.http.post(url, content=json.dumps(body))
            assert response.status_code in (200, 404, 409, 422, 429), response.text
    for noun in ("executions", "invocations"):
        response = api.http.post(f"{V1}/{noun}/nobody/cancel", content=json.dumps(cancellation))
        assert response.status_code in (404, 422), response.text


@FUZZ
@given(
    noun=st.sampled_from(["executions", "invocations"]),
    params=st.dictionaries(
        st.sampled_from(["session_id", "invocation_id", "status", "cursor", "limit"]),
        st.text(max_size=10) | st.integers().map(str),
    ),
)
def test_no_query_breaks_a_list(api: Api, noun: str, params: dict[str, str]) -> None:
    params = {name: text.encode("utf-8", "replace").decode() for name, text in params.items()}
    response = api.http.get(f"{V1}/{noun}", params=params)
    assert response.status_code in (200, 400, 404, 422), response.text


@FUZZ
@given(last=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip))
def test_no_last_event_id_breaks_a_stream(api: Api, ended: str, last: str) -> None:
    url = f"{V1}/executions/{ended}/events"
    response = api.http.get(url, headers={"Last-Event-ID": last})
    assert response.status_code in (200, 422), response.text


@pytest.fixture(scope="module")
def ended(api: Api, fuzzed: str) -> str:
    return str(api.run(fuzzed, "print(1)")["execution_id"])


@pytest.fixture
def listening(api: Api, session: str) -> str:
    """An execution that runs with its stdin open."""
    execution_id = api.submit(session, until("never"), stdin_open=True, timeout=600)
    api.await_status(execution_id, "running")
    return execution_id


@pytest.fixture(scope="module")
def fuzzed(api: Api) -> Iterator[str]:
    session = str(api.create(timeout=3600)["id"])
    yield session
    assert api.run(session, "print('still here')")["stdout"] == "still here\n"
    api.end(session)


def _is_not_a_request(content: bytes) -> bool:
    """Not empty, and no JSON object: `{}` makes a session."""
    return bool(content.strip()) and not content.strip().startswith(b"{}")


@FUZZ
@given(content=st.binary(min_size=1, max_size=200).filter(_is_not_a_request))
def test_no_bytes_break_a_route(api: Api, content: bytes) -> None:
    for path in (
        "/sessions", "/templates", "/sessions/sess_nobody/execute", "/invocations",
        "/executions/exec_nobody/inject", "/executions/exec_nobody/resume",
        "/executions/exec_nobody/cancel", "/invocations/inv_nobody/cancel",
    ):  # fmt: skip
        response = api.http.post(f"{V1}{path}", content=content)
        assert response.status_code in (400, 404, 422), response.text


@FUZZ
@given(path=st.text(max_size=30), query=st.text(max_size=10))
def test_no_path_breaks_the_files(api: Api, fuzzed: str, path: str, query: str) -> None:
    encoded = "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "surrogatepass"))
    response = api.http.get(f"{V1}/sessions/{fuzzed}/files/{encoded}")
    assert response.status_code in (200, 400, 404, 409), response.text
    params = {"path": query, "cursor": path.encode("utf-8", "replace").decode()}
    response = api.http.get(f"{V1}/sessions/{fuzzed}/files", params=params)
    assert response.status_code in (200, 400, 404, 409), response.text
