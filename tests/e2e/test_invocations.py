"""Invocations through the API: every field in every mode, repeated, concurrent and invalid."""

from __future__ import annotations

import base64
import re
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, read_events, until
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick

RAN = "with open('ran', 'a') as file: file.write('.')\n"
"""Leaves a mark in the workspace for each time that it runs."""
ADD = "def add(event):\n    return event['a'] + event['b']\n"


def invoke(api: Api, session: str, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/invocations", json={"session_id": session, **fields})


def invoked(api: Api, session: str, **fields: Any) -> dict[str, Any]:
    """One of mode sync, to its end."""
    return answer(invoke(api, session, **fields))


def result(api: Api, session: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = invoked(api, session, **fields)["result"]
    return found


def get(api: Api, invocation_id: str) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/invocations/{invocation_id}"))


def times_run(api: Api, session: str) -> int:
    return len(api.http.get(f"{V1}/sessions/{session}/files/ran").content)


@pytest.fixture
def own_id() -> str:
    return f"mine-{uuid.uuid4()}"


@pytest.fixture
def other(api: Api) -> Iterator[str]:
    """Another session."""
    session_id = str(api.create()["id"])
    yield session_id
    api.end(session_id)


# The modes


def test_sync_returns_the_result(api: Api, session: str) -> None:
    outcome = invoked(
        api, session, function_name="add", code=ADD, input={"a": 1, "b": 2}, metadata={"k": "v"}
    )

    assert re.fullmatch(r"inv_\d{8}_[0-9a-z]+", outcome["invocation_id"])
    assert re.fullmatch(r"exec_\d{8}_[0-9a-z]+", outcome["execution_id"])
    assert outcome["result"]["execution_id"] == outcome["execution_id"]
    assert outcome["result"]["return_value"] == 3
    del outcome["result"], outcome["invocation_id"], outcome["execution_id"]
    assert outcome["created_at"] <= outcome["completed_at"]
    del outcome["created_at"], outcome["completed_at"]
    assert outcome == {
        "session_id": session, "function_name": "add", "mode": "sync", "status": "succeeded",
        "metadata": {"k": "v"}, "console_url": None,
    }  # fmt: skip


def test_sync_is_the_default_mode(api: Api, session: str) -> None:
    assert invoked(api, session, code="print(1)")["mode"] == "sync"


def test_a_function_that_fails_makes_a_failed_invocation(api: Api, session: str) -> None:
    outcome = invoked(api, session, code=ADD, function_name="add", input={})

    assert outcome["status"] == "failed"
    assert (outcome["result"]["status"], outcome["result"]["error"]["name"]) == (
        "failed",
        "KeyError",
    )
    assert get(api, outcome["invocation_id"]) == outcome


def test_async_returns_at_once_and_can_be_read_by_its_id(api: Api, session: str) -> None:
    response = answer(invoke(api, session, mode="async", code=until("go") + "print(1)"), 202)
    assert (response["status"], response["result"], response["completed_at"]) == (
        "accepted",
        None,
        None,
    )
    invocation_id = response["invocation_id"]
    eventually(lambda: get(api, invocation_id)["status"] == "running")
    api.put(session, "go")
    assert api.result(response["execution_id"])["stdout"] == "1\n"

    ended = get(api, invocation_id)
    assert (ended["status"], ended["result"]["stdout"]) == ("succeeded", "1\n")
    assert ended["execution_id"] == response["execution_id"]


def test_a_stream_contains_the_submission_and_its_events(api: Api, session: str) -> None:
    body = {"session_id": session, "mode": "stream", "code": "print('a')", "metadata": {"k": "v"}}
    with api.http.stream("POST", f"{V1}/invocations", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        events = [
            event for event in read_events(response) if event[1] not in ("queued", "heartbeat")
        ]
    number, name, accepted = events[0]
    assert (number, name) == ("", "accepted")
    assert set(accepted) == {"invocation_id", "execution_id", "session_id"}
    assert [name for _, name, _ in events[1:]] == ["started", "stdout", "result"]
    assert events[-1][2] == api.result(accepted["execution_id"])

    # The same ids as in the stream of the execution.
    assert events[1:] == list(api.events(accepted["execution_id"]))
    shown = get(api, accepted["invocation_id"])
    assert (shown["mode"], shown["metadata"], shown["status"]) == (
        "stream", {"k": "v"}, "succeeded",
    )  # fmt: skip


def test_console_has_a_terminal_and_returns_its_url(api: Api, session: str) -> None:
    code = "import os, sys\nprint(*os.get_terminal_size(), sys.stdin.isatty())\n"
    response = answer(invoke(api, session, mode="console", code=code), 202)
    assert response["console_url"] == f"{V1}/executions/{response['execution_id']}/console"
    assert api.result(response["execution_id"])["stdout"] == "80 24 True\r\n"

    size = {"rows": 10, "cols": 33}
    response = answer(invoke(api, session, mode="console", code=code, terminal=size), 202)
    assert api.result(response["execution_id"])["stdout"] == "33 10 True\r\n"


def test_a_terminal_works_in_every_mode(api: Api, session: str) -> None:
    code = "import os\nprint(*os.get_terminal_size())"
    outcome = result(api, session, code=code, terminal={"rows": 5})

    assert outcome["stdout"] == "80 5\r\n"


@pytest.mark.slow
def test_sync_returns_without_a_result_after_the_maximum_wait(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path, ATOLL_EXECUTION__MAX_WAIT="0.2") as server, server.client() as http:
        api = Api(http)
        session = str(api.create()["id"])
        response = answer(invoke(api, session, code=until("go") + "print(1)"), 202)
        assert response["result"] is None
        assert response["status"] in ("accepted", "running")
        api.put(session, "go")
        eventually(lambda: get(api, response["invocation_id"])["status"] == "succeeded")
        assert get(api, response["invocation_id"])["result"]["stdout"] == "1\n"


def test_sync_waits_no_longer_than_requested(api: Api, session: str) -> None:
    response = answer(invoke(api, session, code=until("go"), wait_ms=0), 202)
    assert response["result"] is None
    api.put(session, "go")
    assert api.result(response["execution_id"])["status"] == "success"


# What it is given


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, {}),
        ({"input": None}, None),
        ({"input": 0}, 0),
        ({"input": False}, False),
        ({"input": ""}, ""),
        ({"input": [1, "ä", {"a": None}]}, [1, "ä", {"a": None}]),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", ["f", None], ids=["named", "handler"])
def test_a_function_gets_its_input_as_json(
    api: Api, session: str, given: dict[str, Any], seen: Any, function: str | None
) -> None:
    code = f"def {function or 'handler'}(event): return [event]"
    fields = {"code": code, "function_name": function, **given}

    assert result(api, session, **fields)["return_value"] == [seen]


def test_a_function_gets_bytes_and_their_content_type(api: Api, session: str) -> None:
    code = (
        "import os\ndef f(data): return [type(data).__name__, list(data), "
        "os.environ['ATOLL_CONTENT_TYPE']]"
    )
    data = base64.b64encode(b"\x00\xff").decode()
    fields = {"code": code, "function_name": "f", "input_base64": data}

    assert result(api, session, **fields)["return_value"] == [
        "bytes", [0, 255], "application/octet-stream",
    ]  # fmt: skip
    outcome = result(api, session, **fields, content_type="image/x-dot; a=b")
    assert outcome["return_value"][2] == "image/x-dot; a=b"


def test_empty_bytes_count_as_input(api: Api, session: str) -> None:
    fields = {"code": "def f(data): return repr(data)", "function_name": "f", "input_base64": ""}

    assert result(api, session, **fields)["return_value"] == "b''"


READ = "import sys\nprint(sys.stdin.buffer.read())"


@pytest.mark.parametrize(
    "program",
    [{"code": READ}, {"command": ["python3", "-c", READ]}, {"code": READ, "args": ["x"]}],
    ids=["code", "command", "arguments"],
)
def test_code_without_a_function_reads_its_input_from_stdin(
    api: Api, session: str, program: dict[str, Any]
) -> None:
    def read(**options: Any) -> str:
        return str(result(api, session, **program, **options)["stdout"])

    data = b"\x00\xff\xfe"
    assert read(input={"a": [1]}) == "b'{\"a\": [1]}'\n"
    assert read(input_base64=base64.b64encode(data).decode()) == f"{data!r}\n"
    assert read(input=None) == "b'null'\n"
    assert read() == "b''\n"


def test_a_shell_script_reads_its_input_from_stdin(api: Api, session: str) -> None:
    assert result(api, session, code="cat; echo", language="shell", input=[1])["stdout"] == "[1]\n"


def test_a_function_can_have_stdin_besides_its_input(api: Api, session: str) -> None:
    code = "import sys\ndef f(event): return [event, sys.stdin.read()]"
    outcome = result(api, session, code=code, function_name="f", input=1, stdin="text")

    assert outcome["return_value"] == [1, "text"]


def test_a_function_of_a_workspace_module_is_invoked(api: Api, session: str) -> None:
    answer(api.http.post(f"{V1}/sessions/{session}/files/mkdir", json={"path": "pack/age"}), 201)
    api.put(session, "mine.py", ADD.encode())
    api.put(session, "pack/age/inner.py", b"async def later(event): return [event]")

    event = {"a": "x", "b": "y"}
    assert result(api, session, function_name="mine:add", input=event)["return_value"] == "xy"
    outcome = result(api, session, function_name="pack.age.inner:later", input=5)
    assert outcome["return_value"] == [5]


@pytest.mark.parametrize(
    "fields",
    [
        {"function_name": "nothing", "code": "x = 1"},
        {"function_name": "x", "code": "x = 1"},
        {"function_name": "json:nothing"},
    ],
    ids=["not there", "not callable", "not in the module"],
)
def test_a_missing_function_fails_with_function_not_found(
    api: Api, session: str, fields: dict[str, Any]
) -> None:
    outcome = invoked(api, session, **fields)

    assert outcome["status"] == "failed"
    assert outcome["result"]["error"]["code"] == "function_not_found"
    problem = "cannot be called" if fields["function_name"] == "x" else "does not exist"
    assert problem in outcome["result"]["error"]["message"]


def test_a_missing_module_fails_with_function_not_found(api: Api, session: str) -> None:
    outcome = invoked(api, session, function_name="nowhere:add")
    assert (outcome["status"], outcome["result"]["error"]["code"]) == (
        "failed",
        "function_not_found",
    )

    api.put(session, "needs.py", b"import nowhere\ndef add(event): pass\n")
    error = invoked(api, session, function_name="needs:add")["result"]["error"]
    assert (error["code"], error["name"]) == ("exception", "ModuleNotFoundError")
    assert "atoll_executor" not in error["traceback"]


def test_an_invocation_accepts_the_other_fields_of_execute(api: Api, session: str) -> None:
    answer(api.http.post(f"{V1}/sessions/{session}/files/mkdir", json={"path": "sub"}), 201)
    code = "import os, sys\nprint(sys.argv[1:], os.environ['A'], os.getcwd(), sys.stdin.read())"
    fields = {"args": ["x y"], "env": {"A": "b"}, "cwd": "sub", "stdin": "in"}

    assert result(api, session, code=code, **fields)["stdout"] == ("['x y'] b /workspace/sub in\n")


def test_a_timeout_is_in_milliseconds(api: Api, session: str) -> None:
    outcome = invoked(api, session, code="while True: pass", timeout_ms=150)

    assert (outcome["status"], outcome["result"]["status"]) == ("failed", "timeout")
    # Less than the default timeout.
    assert outcome["result"]["execution_time"] < 30
    assert api.execution(outcome["execution_id"])["timeout"] == 0.15


def test_code_has_the_ids_of_its_invocation_execution_and_session(api: Api, session: str) -> None:
    code = "import os\nfor name in ('INVOCATION', 'EXECUTION', 'SESSION'):\n"
    code += "    print(os.environ[f'ATOLL_{name}_ID'])"
    outcome = invoked(api, session, code=code)

    assert outcome["result"]["stdout"].split() == [
        outcome["invocation_id"], outcome["execution_id"], session,
    ]  # fmt: skip


def test_execute_is_the_short_form_of_an_invocation(api: Api, session: str) -> None:
    response = answer(api.execute(session, code="print(1)"), 202)
    api.result(response["execution_id"])

    found = get(api, response["invocation_id"])
    assert (found["execution_id"], found["mode"]) == (response["execution_id"], "async")
    assert found["result"]["stdout"] == "1\n"


# Refusals


BIG = "x" * (4 * 1024 * 1024 + 1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, ["code"]),
        ({"session_id": None, "code": "1"}, ["session_id"]),
        ({"session_id": "../etc", "code": "1"}, ["session_id"]),
        ({"session_id": "a/b", "code": "1"}, ["session_id"]),
        ({"code": "1", "command": ["true"]}, ["command"]),
        ({"code": 1}, ["code"]),
        ({"code": BIG}, ["code"]),
        ({"command": []}, ["command"]),
        ({"command": ["true"], "function_name": "f"}, ["function_name"]),
        ({"function_name": "f"}, ["function_name"]),
        ({"function_name": "a:b", "code": "1"}, ["function_name"]),
        ({"function_name": "f", "code": "1", "language": "shell"}, ["function_name"]),
        ({"function_name": "", "code": "1"}, ["function_name"]),
        ({"function_name": "a-b", "code": "1"}, ["function_name"]),
        ({"function_name": "os.path:join;x"}, ["function_name"]),
        ({"function_name": "f\n", "code": "1"}, ["function_name"]),
        ({"code": "1", "language": "cobol"}, ["language"]),
        ({"code": "1", "mode": "later"}, ["mode"]),
        ({"code": "1", "mode": None}, ["mode"]),
        ({"code": "1", "invocation_id": ""}, ["invocation_id"]),
        ({"code": "1", "invocation_id": ".hidden"}, ["invocation_id"]),
        ({"code": "1", "invocation_id": "a/b"}, ["invocation_id"]),
        ({"code": "1", "invocation_id": "x" * 65}, ["invocation_id"]),
        ({"code": "1", "invocation_id": "a\n"}, ["invocation_id"]),
        ({"code": "1", "execution_id": "a b"}, ["execution_id"]),
        ({"code": "1", "execution_id": 5}, ["execution_id"]),
        ({"code": "1", "timeout_ms": 0}, ["timeout_ms"]),
        ({"code": "1", "timeout_ms": -5}, ["timeout_ms"]),
        ({"code": "1", "timeout_ms": 0.5}, ["timeout_ms"]),
        ({"code": "1", "timeout_ms": "soon"}, ["timeout_ms"]),
        ({"code": "1", "wait_ms": -1}, ["wait_ms"]),
        ({"code": "1", "input": 1, "input_base64": "eA=="}, ["input_base64"]),
        ({"code": "1", "input_base64": "%"}, ["input_base64"]),
        ({"code": "1", "input_base64": "eA"}, ["input_base64"]),
        ({"code": "1", "input": 1, "stdin": "x"}, ["stdin"]),
        ({"code": "1", "content_type": "text/plain"}, ["content_type"]),
        ({"code": "1", "input": 1, "content_type": "a\nb"}, ["content_type"]),
        ({"code": "1", "input": 1, "content_type": ""}, ["content_type"]),
        ({"code": "1", "metadata": {"a": 1}}, ["metadata.a"]),
        ({"code": "1", "metadata": {"": "a"}}, ["metadata..[key]"]),
        ({"code": "1", "metadata": ["a"]}, ["metadata"]),
        ({"code": "1", "metadata": {"a": "x" * 4097}}, ["metadata.a"]),
        ({"code": "1", "metadata": {str(n): "" for n in range(65)}}, ["metadata"]),
        ({"code": "1", "terminal": {"rows": 0}}, ["terminal.rows"]),
        ({"code": "1", "terminal": {"cols": 65_536}}, ["terminal.cols"]),
        ({"code": "1", "terminal": {"depth": 1}}, ["terminal.depth"]),
        ({"code": "1", "terminal": {}, "stdin": "x"}, ["stdin"]),
        ({"code": "1", "mode": "console", "stdin": "x"}, ["stdin"]),
        ({"code": "1", "mode": "console", "input": 1}, ["input"]),
        ({"code": "1", "mode": "console", "context_id": "c"}, ["context_id"]),
        ({"command": ["true"], "context_id": "c"}, ["context_id"]),
        ({"code": "1", "env": {"A=B": "x"}}, ["env.A=B.[key]"]),
        ({"code": "1", "cwd": ""}, ["cwd"]),
        ({"code": "1", "stdin_open": "perhaps"}, ["stdin_open"]),
        ({"code": "1", "colour": "red"}, ["colour"]),
        ({"code": "1", "task_id": "t"}, ["task_id"]),
        ({"code": 1, "timeout_ms": 0, "mode": "x"}, ["code", "mode", "timeout_ms"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_body_is_refused_with_its_field(
    api: Api, session: str, fields: dict[str, Any], named: list[str]
) -> None:
    refused = problem(invoke(api, session, **fields), 422, "invalid_request")

    assert sorted(item["field"] for item in refused["errors"]) == named
    assert all(item["message"] for item in refused["errors"])


def test_a_timeout_beyond_the_limit_is_refused(api: Api, session: str) -> None:
    refused = problem(invoke(api, session, code="1", timeout_ms=1_800_001), 422, "invalid_request")
    assert "1800" in refused["detail"]


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_deeply_nested_input_does_no_harm(api: Api, session: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"session_id": "%s", "code": "def handler(event): return 1", "input": %s}'
    response = api.http.post(f"{V1}/invocations", content=body % (session.encode(), nested))

    assert response.status_code in (200, 400, 413, 422), response.text


def test_a_body_that_is_not_json_is_refused(api: Api, session: str) -> None:
    for content in (b"", b"{", b"\xff", b'{"session_id": "x",}'):
        response = api.http.post(f"{V1}/invocations", content=content)
        assert response.status_code in (400, 422), response.text
    body = f'{{"session_id": "{session}", "code": "1", "input": NaN}}'
    problem(api.http.post(f"{V1}/invocations", content=body), 422, "invalid_request")


def test_unknown_ids_are_not_found(api: Api) -> None:
    problem(invoke(api, "sess_nobody", code="1"), 404, "session_not_found")
    for path in ("", "/executions"):
        response = api.http.get(f"{V1}/invocations/inv_nobody{path}")
        problem(response, 404, "invocation_not_found")
    response = api.http.post(f"{V1}/invocations/inv_nobody/cancel")
    problem(response, 404, "invocation_not_found")


def test_an_ended_session_takes_no_invocations(api: Api) -> None:
    session = api.create()["id"]
    api.end(session)

    for mode in ("sync", "async", "stream", "console"):
        refused = problem(invoke(api, session, code="1", mode=mode), 409, "session_ended")
        assert refused["status_now"] == "terminated"


# Ids of one's own


def test_a_repeated_invocation_id_is_one_run(api: Api, session: str, own_id: str) -> None:
    first = invoked(api, session, code=RAN, invocation_id=own_id)
    second = invoked(api, session, code=RAN, invocation_id=own_id)

    assert first["invocation_id"] == own_id
    assert second == first
    assert times_run(api, session) == 1


def test_a_repeated_execution_id_is_one_run(api: Api, session: str, own_id: str) -> None:
    first = invoked(api, session, code=RAN, execution_id=own_id)
    assert first["execution_id"] == own_id
    assert invoked(api, session, code=RAN, execution_id=own_id) == first
    response = answer(api.execute(session, code=RAN, execution_id=own_id, wait=20))
    assert response == first["result"]
    assert times_run(api, session) == 1


@pytest.mark.parametrize("names", [["invocation_id"], ["execution_id"],
                                   ["invocation_id", "execution_id"]], ids="+".join)  # fmt: skip
@pytest.mark.parametrize("mode", ["sync", "async", "stream"])
def test_concurrent_requests_with_the_same_ids_are_one_run(
    api: Api, server: Server, session: str, own_id: str, names: list[str], mode: str
) -> None:
    fields = {"code": RAN, "mode": mode, **dict.fromkeys(names, own_id)}

    def call(_: int) -> str:
        with server.client() as http:
            response = http.post(f"{V1}/invocations", json={"session_id": session, **fields})
            assert response.status_code in (200, 202), response.text
            if mode == "stream":
                events = list(read_events(response))
                assert events[-1][1] == "result"
                return str(events[0][2]["execution_id"])
            return str(response.json()["execution_id"])

    with ThreadPoolExecutor(8) as threads:
        (execution_id,) = set(threads.map(call, range(8)))

    assert api.result(execution_id)["status"] == "success"
    assert times_run(api, session) == 1
    listed = answer(api.http.get(f"{V1}/invocations?session_id={session}"))["items"]
    assert len(listed) == 1
    listed = answer(api.http.get(f"{V1}/executions?session_id={session}"))["items"]
    assert [item["id"] for item in listed] == [execution_id]


def test_an_id_of_another_session_is_in_use(
    api: Api, session: str, other: str, own_id: str
) -> None:
    invoked(api, session, code=RAN, invocation_id=own_id, execution_id=f"{own_id}.e")

    problem(invoke(api, other, code=RAN, invocation_id=own_id), 409, "invocation_id_in_use")
    fields = {"code": RAN, "execution_id": f"{own_id}.e"}
    problem(invoke(api, other, **fields), 409, "execution_id_in_use")
    problem(api.execute(other, **fields), 409, "execution_id_in_use")
    assert api.names(other) == []


def test_an_execution_id_of_another_invocation_is_in_use(
    api: Api, session: str, own_id: str
) -> None:
    invoked(api, session, code=RAN, invocation_id=own_id, execution_id=f"{own_id}.e")
    fields = {"code": RAN, "invocation_id": f"{own_id}.2", "execution_id": f"{own_id}.e"}

    problem(invoke(api, session, **fields), 409, "execution_id_in_use")
    assert times_run(api, session) == 1


def test_a_new_execution_id_retries_a_failed_invocation(
    api: Api, session: str, own_id: str
) -> None:
    code = RAN + "import os\nassert os.path.exists('now')\nprint('good')"
    first = invoked(api, session, code=code, invocation_id=own_id, metadata={"k": "v"})
    assert first["status"] == "failed"
    # The id alone is only a repetition.
    assert invoked(api, session, code=code, invocation_id=own_id) == first
    api.put(session, "now")
    again = {"code": code, "invocation_id": own_id, "execution_id": f"{own_id}.2"}
    second = invoked(api, session, **again)

    assert (second["status"], second["result"]["stdout"]) == ("succeeded", "good\n")
    assert second["execution_id"] == f"{own_id}.2"
    assert second["metadata"] == {"k": "v"}
    assert invoked(api, session, **again) == second
    listed = answer(api.http.get(f"{V1}/invocations/{own_id}/executions"))["items"]
    assert [item["id"] for item in listed] == [second["execution_id"], first["execution_id"]]
    assert {item["invocation_id"] for item in listed} == {own_id}
    # The first one is still what it was.
    assert api.result(first["execution_id"])["status"] == "failed"
    assert times_run(api, session) == 2


def test_concurrent_retries_make_one_new_execution(
    api: Api, server: Server, session: str, own_id: str
) -> None:
    code = RAN + "raise SystemExit(1)"
    invoked(api, session, code=code, invocation_id=own_id)

    def call(number: int) -> int:
        with server.client() as http:
            mine = {"execution_id": f"{own_id}.{number}", "invocation_id": own_id}
            return invoke(Api(http), session, code=until("go"), mode="async", **mine).status_code

    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(call, range(8)))
    assert sorted(responses) == [202] + [409] * 7
    api.put(session, "go")


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", "succeeded"), (until("never"), "running"), (None, "cancelled")],
    ids=["succeeded", "running", "cancelled"],
)
def test_only_a_failed_invocation_is_retried(
    api: Api, session: str, own_id: str, code: str | None, status: str
) -> None:
    response = invoke(api, session, code=code or until("never"), mode="async", invocation_id=own_id)
    execution_id = answer(response, 202)["execution_id"]
    if status == "cancelled":
        answer(api.http.post(f"{V1}/invocations/{own_id}/cancel"))
    eventually(lambda: get(api, own_id)["status"] == status)
    fields = {"code": "pass", "invocation_id": own_id, "execution_id": f"{own_id}.2"}
    refused = problem(invoke(api, session, **fields), 409, "invocation_not_failed")

    assert refused["status_now"] == status
    if status == "running":
        answer(api.http.post(f"{V1}/executions/{execution_id}/cancel"))


# Idempotency keys


def keyed(api: Api, key: str, session: str, **fields: Any) -> httpx.Response:
    body = {"session_id": session, **fields}
    return api.http.post(f"{V1}/invocations", json=body, headers={"Idempotency-Key": key})


def test_a_key_creates_an_invocation_once(api: Api, session: str, own_id: str) -> None:
    first, second = (keyed(api, own_id, session, code=RAN) for _ in range(2))

    assert answer(first) == answer(second)
    assert second.headers["idempotency-replayed"] == "true"
    assert times_run(api, session) == 1


def test_a_new_key_with_a_known_invocation_id_is_the_same_invocation(
    api: Api, session: str, own_id: str
) -> None:
    code = RAN + "raise SystemExit(1)"
    first = keyed(api, f"{own_id}.1", session, code=code, invocation_id=own_id)
    second = keyed(api, f"{own_id}.2", session, code=code, invocation_id=own_id)

    assert answer(first) == answer(second)
    assert times_run(api, session) == 1


@pytest.mark.parametrize("padding", [0, 200_000], ids=["small", "large"])
def test_a_stream_repeated_with_its_key_replays_the_same_execution(
    api: Api, session: str, own_id: str, padding: int
) -> None:
    fields = {"mode": "stream", "code": RAN + f"print('a')\n#{'x' * padding}"}
    received = [list(read_events(keyed(api, own_id, session, **fields))) for _ in range(3)]

    assert received[0][-1][1] == "result"
    for events in received:
        events[:] = [event for event in events if event[1] not in ("queued", "heartbeat")]
    assert received[1] == received[0] == received[2]
    assert times_run(api, session) == 1
    other = keyed(api, own_id, session, **{**fields, "code": "print('b')"})
    problem(other, 422, "idempotency_key_reused")


def test_a_stream_with_a_key_is_sent_live(api: Api, session: str, own_id: str) -> None:
    body = {"session_id": session, "mode": "stream", "code": "print('a')\n" + until("go")}
    headers = {"Idempotency-Key": own_id}
    with api.http.stream("POST", f"{V1}/invocations", json=body, headers=headers) as response:
        events = read_events(response)
        assert next(data for _, name, data in events if name == "stdout") == {"text": "a\n"}
        # Nothing ends before this.
        api.put(session, "go")
        assert [name for _, name, _ in events][-1] == "result"


# Clients that disconnect


@contextmanager
def asking(server: Server, body: dict[str, Any], **headers: str) -> Iterator[socket.socket]:
    """Send a request, and be gone at the end of the block."""
    # Byte by byte what the client sends, or it would be another request.
    content = httpx.Request("POST", server.url, json=body).content
    address = httpx.URL(server.url)
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join(
        [
            f"POST {V1}/invocations HTTP/1.1", "Host: atoll", f"Authorization: Bearer {server.key}",
            "Content-Type: application/json", f"Content-Length: {len(content)}", *lines, "", "",
        ]
    )  # fmt: skip
    with socket.create_connection((address.host, address.port or 80), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def disconnect_after(server: Server, body: dict[str, Any], wanted: bytes, **headers: str) -> None:
    """Send a request, read until `wanted` has come, and be gone."""
    with asking(server, body, **headers) as connection:
        seen = b""
        while wanted not in seen:
            piece = connection.recv(65_536)
            assert piece, seen
            seen += piece


def test_a_client_that_leaves_a_stream_does_not_stop_the_execution(
    api: Api, server: Server, session: str, own_id: str
) -> None:
    code = "print('a', flush=True)\n" + until("go") + RAN + "print('b')"
    body = {"session_id": session, "mode": "stream", "code": code, "invocation_id": own_id}
    disconnect_after(server, body, b"event: stdout")
    assert get(api, own_id)["status"] == "running"
    api.put(session, "go")

    # A client that resumes with the same id receives all events.
    events = list(read_events(invoke(api, session, **{**body, "session_id": session})))
    text = "".join(data["text"] for _, name, data in events if name == "stdout")
    assert text == "a\nb\n"
    assert times_run(api, session) == 1


def test_a_client_that_disconnects_while_waiting_can_read_the_result_later(
    api: Api, server: Server, session: str, own_id: str
) -> None:
    code = until("go") + RAN + "print('b')"
    body = {"session_id": session, "code": code, "invocation_id": own_id}
    with asking(server, body):
        eventually(lambda: api.http.get(f"{V1}/invocations/{own_id}").status_code == 200)
    api.put(session, "go")

    assert invoked(api, session, **body)["result"]["stdout"] == "b\n"
    assert times_run(api, session) == 1


def test_a_client_that_leaves_a_stream_can_resume_it_with_its_key(
    api: Api, server: Server, session: str, own_id: str
) -> None:
    code = "print('a', flush=True)\n" + until("go") + RAN
    body = {"session_id": session, "mode": "stream", "code": code}
    disconnect_after(server, body, b"event: stdout", Idempotency_Key=own_id)
    # The server need not have noticed.
    headers = {"Idempotency-Key": own_id}
    with api.http.stream("POST", f"{V1}/invocations", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        api.put(session, "go")
        events = list(read_events(response))

    assert [name for _, name, _ in events if name in ("accepted", "result")] == [
        "accepted",
        "result",
    ]
    assert times_run(api, session) == 1


# The list


def pages(api: Api, path: str, **params: Any) -> list[list[dict[str, Any]]]:
    found = []
    while True:
        page = answer(api.http.get(f"{V1}/{path}", params=params))
        found.append(page["items"])
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]


def test_invocations_are_listed_newest_first_page_by_page(
    api: Api, session: str, other: str
) -> None:
    made = [invoked(api, session, code=f"print({n})")["invocation_id"] for n in range(5)]
    invoked(api, other, code="pass")
    found = pages(api, "invocations", session_id=session, limit=2)

    assert [len(page) for page in found] == [2, 2, 1]
    assert [item["invocation_id"] for page in found for item in page] == made[::-1]
    assert {item["result"] for page in found for item in page} == {None}
    everything = pages(api, "invocations", limit=500)
    assert set(made) <= {item["invocation_id"] for page in everything for item in page}


def test_invocations_are_listed_by_status(api: Api, session: str) -> None:
    def listed(status: str) -> list[str]:
        (found,) = pages(api, "invocations", session_id=session, status=status)
        return [item["invocation_id"] for item in found]

    def submitted(code: str, **fields: Any) -> str:
        response = answer(invoke(api, session, code=code, mode="async", **fields), 202)
        return str(response["invocation_id"])

    made = {
        "succeeded": invoked(api, session, code="pass")["invocation_id"],
        "failed": invoked(api, session, code="1/0")["invocation_id"],
        "running": submitted(until("never"), timeout_ms=300_000),
        "accepted": submitted("pass"),
        "cancelled": submitted("pass"),
    }
    answer(api.http.post(f"{V1}/invocations/{made['cancelled']}/cancel"))
    # Only what lasts is listed as such.
    eventually(lambda: listed("running") == [made["running"]])

    assert {status: listed(status) for status in made} == {
        status: [invocation_id] for status, invocation_id in made.items()
    }
    answer(api.http.post(f"{V1}/invocations/{made['running']}/cancel"))


def test_executions_of_all_sessions_are_listed_and_filtered(
    api: Api, session: str, other: str
) -> None:
    first = invoked(api, session, code="pass")
    second = invoked(api, other, code="1/0")

    def ids(**params: str) -> list[str]:
        return [item["id"] for page in pages(api, "executions", **params) for item in page]

    assert ids(session_id=session) == [first["execution_id"]]
    assert ids(invocation_id=second["invocation_id"]) == [second["execution_id"]]
    assert ids(session_id=other, status="completed") == []
    assert ids(invocation_id="inv_nobody") == []
    failed = ids(status="failed")
    assert second["execution_id"] in failed
    assert first["execution_id"] not in failed


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("invocations?status=tired", 422, "invalid_request"),
        ("invocations?limit=0", 422, "invalid_request"),
        ("invocations?limit=501", 422, "invalid_request"),
        ("invocations?cursor=nonsense", 400, "bad_cursor"),
        ("invocations?session_id=sess_nobody", 404, "session_not_found"),
        ("executions?status=tired", 422, "invalid_request"),
        ("executions?limit=101", 422, "invalid_request"),
        ("executions?cursor=nonsense", 400, "bad_cursor"),
        ("executions?session_id=sess_nobody", 404, "session_not_found"),
        ("executions?session_id=a&invocation_id=b", 422, "invalid_request"),
    ],
)
def test_an_invalid_list_query_is_refused(api: Api, query: str, status: int, code: str) -> None:
    problem(api.http.get(f"{V1}/{query}"), status, code)


# Cancelling


@pytest.mark.parametrize("noun", ["invocations", "executions"])
def test_a_running_execution_is_cancelled_with_a_reason(api: Api, session: str, noun: str) -> None:
    response = answer(invoke(api, session, code="print(1)\n" + until("never"), mode="async"), 202)
    next(name for _, name, _ in api.events(response["execution_id"]) if name == "stdout")
    own = response["invocation_id" if noun == "invocations" else "execution_id"]
    url = f"{V1}/{noun}/{own}/cancel"
    first = answer(api.http.post(url, json={"reason": "no longer wanted"}))
    assert first["status"] == "cancelled"
    assert answer(api.http.post(url, json={"reason": "another"})) == first

    found = get(api, response["invocation_id"])
    assert (found["status"], found["result"]["status"]) == ("cancelled", "error")
    assert found["result"]["error"] == {
        "code": "cancelled", "message": "The execution was cancelled: no longer wanted",
    }  # fmt: skip
    assert (found["result"]["cause"], found["result"]["stdout"]) == ("user", "1\n")


@pytest.mark.parametrize("noun", ["invocations", "executions"])
def test_a_queued_execution_is_cancelled_and_never_runs(api: Api, session: str, noun: str) -> None:
    running = answer(invoke(api, session, code=until("go"), mode="async"), 202)
    waiting = answer(invoke(api, session, code=RAN, mode="async"), 202)
    own = waiting["invocation_id" if noun == "invocations" else "execution_id"]
    url = f"{V1}/{noun}/{own}/cancel"
    assert answer(api.http.post(url, json={"reason": "why"}))["status"] == "cancelled"
    assert answer(api.http.post(url))["status"] == "cancelled"
    api.put(session, "go")

    assert api.result(running["execution_id"])["status"] == "success"
    response = get(api, waiting["invocation_id"])["result"]
    assert (response["error"]["message"], response["exit_code"]) == (
        "The execution was cancelled: why",
        None,
    )
    assert "ran" not in api.names(session)


@pytest.mark.parametrize(("code", "status", "now"), [
    ("pass", "succeeded", "completed"), ("1/0", "failed", "failed")])  # fmt: skip
def test_an_ended_execution_is_not_cancelled(
    api: Api, session: str, code: str, status: str, now: str
) -> None:
    outcome = invoked(api, session, code=code)
    url = f"{V1}/invocations/{outcome['invocation_id']}/cancel"
    assert problem(api.http.post(url), 409, "invocation_ended")["status_now"] == status
    url = f"{V1}/executions/{outcome['execution_id']}/cancel"
    assert problem(api.http.post(url), 409, "execution_ended")["status_now"] == now
    assert get(api, outcome["invocation_id"]) == outcome


@pytest.mark.parametrize("noun", ["invocations", "executions"])
@pytest.mark.parametrize(
    "body",
    [{"reason": 1}, {"reason": "x" * 1001}, {"why": "x"}, []],
    ids=lambda body: str(body)[:9],
)
def test_an_invalid_cancellation_is_refused(api: Api, noun: str, body: Any) -> None:
    problem(api.http.post(f"{V1}/{noun}/x/cancel", json=body), 422, "invalid_request")


def test_concurrent_cancellations_get_the_same_response(
    api: Api, server: Server, session: str
) -> None:
    response = answer(invoke(api, session, code=until("never"), mode="async"), 202)

    def call(number: int) -> dict[str, Any]:
        with server.client() as http:
            url = f"{V1}/invocations/{response['invocation_id']}/cancel"
            return answer(http.post(url, json={"reason": str(number)}))

    with ThreadPoolExecutor(8) as threads:
        assert {one["status"] for one in threads.map(call, range(8))} == {"cancelled"}
