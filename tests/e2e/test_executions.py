"""Executions in a session: their input, order, end and events."""

from __future__ import annotations

import base64
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared import environment_variables
from tests import drivers
from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server
from tests.missing import missing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.quick


# What an execution is given


def test_stdin_is_read_to_its_end(api: Api, session: str) -> None:
    text = "a line\nä\n" + "x" * 200_000
    code = "import sys\nprint(len(sys.stdin.read()))"

    assert api.run(session, code, stdin=text)["stdout"] == f"{len(text)}\n"


def test_omitted_stdin_is_empty(api: Api, session: str) -> None:
    assert api.run(session, "import sys\nprint(repr(sys.stdin.read()))")["stdout"] == "''\n"


def test_unread_stdin_does_no_harm(api: Api, session: str) -> None:
    assert api.run(session, "print(1)", stdin="x" * 1_000_000)["status"] == "success"


def test_args_reach_python_shell_and_javascript(api: Api, session: str) -> None:
    assert api.run(session, "import sys\nprint(sys.argv[1:])", args=["a b", "ü"])["stdout"] == (
        "['a b', 'ü']\n"
    )
    assert api.run(session, 'echo "$2-$1"', language="shell", args=["a", "b"])["stdout"] == "b-a\n"


def test_environment_of_an_execution_overrides_that_of_its_session(api: Api) -> None:
    session = api.create(env_vars={"A": "session", "B": "session"})["id"]
    code = "import os\nprint(os.environ['A'], os.environ['B'], os.environ['C'])"
    result = api.run(session, code, env={"B": "execution", "C": "ä\n"})

    assert result["stdout"] == "session execution ä\n\n"
    assert "KeyError" in api.run(session, code)["stderr"]
    api.end(session)


def test_the_environment_contains_nothing_of_the_server(api: Api, session: str) -> None:
    lines = api.run(session, command=["env"])["stdout"].splitlines()
    names = {line.partition("=")[0] for line in lines}

    own = {name for name in names if name.startswith("ATOLL_")}
    given = {"PATH", "PYTHONPATH", "PWD"} | environment_variables.INSTANCE.keys()
    assert names - own <= given | drivers.VARIABLES
    assert own <= {
        "ATOLL_PYTHON", "ATOLL_STAGING", "ATOLL_EXECUTION_ID", "ATOLL_SESSION_ID",
        "ATOLL_INVOCATION_ID",
    }  # fmt: skip


@pytest.mark.parametrize("cwd", ["sub/dir", "/workspace/sub/dir"], ids=["relative", "absolute"])
def test_cwd_is_the_working_directory_of_the_code(api: Api, session: str, cwd: str) -> None:
    answer(api.http.post(f"{V1}/sessions/{session}/files/mkdir", json={"path": "sub/dir"}), 201)

    assert api.run(session, "import os\nprint(os.getcwd())", cwd=cwd)["stdout"] == (
        "/workspace/sub/dir\n"
    )
    assert api.run(session, command=["pwd"], cwd=cwd)["stdout"] == "/workspace/sub/dir\n"


def test_code_imports_modules_of_the_workspace(api: Api, session: str) -> None:
    api.put(session, "mine.py", b"VALUE = 5\n")

    assert api.run(session, "import mine\nprint(mine.VALUE)")["stdout"] == "5\n"


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_command_gets_its_arguments_unchanged(api: Api, session: str) -> None:
    result = api.run(session, command=["printf", "%s|", "a b", "$HOME", "*", ""])

    assert result["stdout"] == "a b|$HOME|*||"
    assert api.execution(result["execution_id"])["command"][0] == "printf"
    assert api.execution(result["execution_id"])["language"] is None


def test_shell_code_runs_in_a_shell(api: Api, session: str) -> None:
    code = "set -e\nfor i in 1 2 3; do echo $i; done | tac\n"

    assert api.run(session, code, language="shell")["stdout"] == "3\n2\n1\n"


def test_javascript_runs(api: Api, session: str) -> None:
    if shutil.which("node") is None:
        missing("node is not installed (package nodejs)")
    code = "console.log([1, 2].map(x => x * 2), process.argv.slice(1))"
    result = api.run(session, code, language="javascript", args=["x"])

    assert (result["stdout"], result["stderr"]) == ("[ 2, 4 ] [ 'x' ]\n", "")
    failed = api.run(session, "throw new Error('no')", language="javascript")
    assert (failed["status"], failed["exit_code"]) == ("failed", 1)


def test_code_longer_than_an_argument_runs_in_every_language(api: Api, session: str) -> None:
    padding = "x" * 300_000

    assert api.run(session, f"a = '{padding}'\nprint(len(a))")["stdout"] == "300000\n"
    shell = api.run(session, f"a={padding}; echo ${{#a}} $1", language="shell", args=["z"])
    assert shell["stdout"] == "300000 z\n"


def test_an_execution_leaves_nothing_for_the_next(api: Api, session: str) -> None:
    api.run(session, "import os, sys, builtins\nbuiltins.left = 1\nos.environ['LEFT'] = '1'")
    code = "import os, builtins\nprint(hasattr(builtins, 'left'), 'LEFT' in os.environ)"

    assert api.run(session, code)["stdout"] == "False False\n"


# Refusals


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"code": "1", "command": ["true"]},
        {"code": "1", "language": "cobol"},
        {"command": []},
        {"command": ["a\0b"]},
        {"code": "1", "timeout": 0},
        {"code": "1", "timeout": -1},
        {"code": "1", "timeout": 1801},
        {"code": "1", "timeout": "soon"},
        {"code": "1", "wait": -1},
        {"code": "1", "env": {"A=B": "x"}},
        {"code": "1", "env": {"A": "\0"}},
        {"code": "1", "cwd": ""},
        {"code": "1", "colour": "red"},
        {"code": 1},
        [],
        "code",
    ],
    ids=str,
)
def test_an_invalid_body_is_refused(api: Api, session: str, body: Any) -> None:
    response = api.http.post(f"{V1}/sessions/{session}/execute", json=body)

    problem(response, 422, "invalid_request")


def test_a_refusal_contains_the_field(api: Api, session: str) -> None:
    body = {"code": "1", "timeout": 1801}
    error = problem(api.execute(session, **body), 422, "invalid_request")
    assert error["field"] == "timeout"
    assert "1800" in error["detail"]

    error = problem(api.execute(session, code="1", colour="red"), 422, "invalid_request")
    assert [item["field"] for item in error["errors"]] == ["colour"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"code": "1",}', b"\xff\xfe"], ids=["empty", "cut", "comma", "bytes"]
)
def test_a_body_that_is_not_json_is_refused(api: Api, session: str, content: bytes) -> None:
    response = api.http.post(f"{V1}/sessions/{session}/execute", content=content)

    problem(response, 400, "bad_json")


def test_an_integer_of_five_thousand_digits_does_no_harm(api: Api, session: str) -> None:
    body = b'{"code": "def handler(event): return 1", "wait": 20, "event": ' + b"9" * 5000 + b"}"
    response = api.http.post(f"{V1}/sessions/{session}/execute", content=body)

    assert response.status_code in (200, 400, 422), response.text


def test_unknown_ids_are_not_found(api: Api) -> None:
    problem(api.execute("sess_nobody", code="1"), 404, "session_not_found")
    problem(api.http.get(f"{V1}/sessions/sess_nobody/executions"), 404, "session_not_found")
    for path in ("", "/status", "/result", "/events"):
        response = api.http.get(f"{V1}/executions/exec_nobody{path}")
        problem(response, 404, "execution_not_found")
    response = api.http.post(f"{V1}/executions/exec_nobody/cancel")
    problem(response, 404, "execution_not_found")


# Waiting


def test_a_wait_that_is_too_short_returns_the_id(api: Api, session: str) -> None:
    response = api.execute(session, code=until("go") + "print('there')", wait=0.05)
    execution_id = answer(response, 202)["execution_id"]
    api.put(session, "go")

    assert api.result(execution_id)["stdout"] == "there\n"


def test_a_result_that_does_not_exist_yet_is_a_conflict(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go"))
    response = api.http.get(f"{V1}/executions/{execution_id}/result?wait=0.05")

    assert problem(response, 409, "execution_not_finished")["status_now"] in ("pending", "running")
    api.put(session, "go")
    assert api.result(execution_id)["status"] == "success"


def test_all_waiting_requests_return_when_the_execution_ends(
    api: Api, session: str, server: Server
) -> None:
    execution_id = api.submit(session, until("go") + "print('all')")

    def wait() -> str:
        with server.client() as http:
            return str(Api(http).result(execution_id)["stdout"])

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(wait) for _ in range(8)]
        api.await_status(execution_id, "running")
        api.put(session, "go")
        assert [each.result() for each in waiting] == ["all\n"] * 8


# One at a time


@pytest.mark.every_driver
def test_executions_of_a_session_run_one_at_a_time_in_order(api: Api, session: str) -> None:
    first = api.submit(session, until("go") + "open('log', 'a').write('0')")
    mark = "open('log', 'a').write('<')\nopen('log', 'a').write('{}>')"
    rest = [api.submit(session, mark.format(number)) for number in range(1, 9)]
    assert {api.status(execution_id) for execution_id in rest} == {"pending"}
    api.put(session, "go")
    for execution_id in [first, *rest]:
        assert api.result(execution_id)["status"] == "success"

    wanted = "0" + "".join(f"<{number}>" for number in range(1, 9))
    assert api.run(session, "print(open('log').read())")["stdout"].strip() == wanted


def test_sessions_do_not_wait_for_each_other(api: Api, session: str) -> None:
    other = api.create()["id"]
    execution_id = api.submit(session, until("go"))

    assert api.run(other, "print(1)")["status"] == "success"
    assert api.status(execution_id) in ("pending", "running")
    api.put(session, "go")
    api.end(other)


@pytest.mark.slow
def test_many_concurrent_executions_of_one_session_all_complete(
    api: Api, session: str, server: Server
) -> None:
    def work(number: int) -> list[str]:
        with server.client() as http:
            mine = Api(http)
            return [mine.run(session, f"print({number}, {turn})")["stdout"] for turn in range(25)]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(8)))

    assert results == [[f"{number} {turn}\n" for turn in range(25)] for number in range(8)]


@pytest.mark.slow
def test_executions_beyond_the_queue_limit_are_refused_temporarily(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path, ATOLL_EXECUTION__QUEUE_LIMIT="2") as server, server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        running = api.submit(session, until("go"))
        api.await_status(running, "running")
        waiting = [api.submit(session, "print(1)") for _ in range(2)]
        refused = api.execute(session, code="print(1)")
        problem(refused, 429, "session_busy")
        assert int(refused.headers["retry-after"]) >= 1
        api.put(session, "go")
        for execution_id in waiting:
            assert api.result(execution_id)["status"] == "success"
        assert api.run(session, "print(2)")["status"] == "success"


# Cancelling


def test_a_running_execution_is_cancelled(api: Api, session: str) -> None:
    execution_id = api.submit(session, "print('before', flush=True)\nimport time\ntime.sleep(1000)")
    name, _ = next((name, data) for _, name, data in api.events(execution_id) if name == "stdout")
    assert name == "stdout"
    response = answer(api.http.post(f"{V1}/executions/{execution_id}/cancel"))
    assert response["status"] == "cancelled"

    result = api.result(execution_id, wait=0)
    assert (result["status"], result["cause"]) == ("error", "user")
    assert result["error"]["code"] == "cancelled"
    assert result["stdout"] == "before\n"
    assert api.run(session, "print(1)")["status"] == "success"


def test_an_execution_that_ignores_sigterm_is_cancelled(api: Api, session: str) -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1)\ntime.sleep(1000)"
    execution_id = api.submit(session, code)
    next(name for _, name, _ in api.events(execution_id) if name == "stdout")

    answer(api.http.post(f"{V1}/executions/{execution_id}/cancel"))
    assert api.result(execution_id)["error"]["code"] == "cancelled"
    assert api.status(execution_id) == "cancelled"


def test_a_queued_execution_is_cancelled_at_once_and_never_runs(api: Api, session: str) -> None:
    running = api.submit(session, until("go"))
    waiting = api.submit(session, "open('ran', 'w').close()")
    after = api.submit(session, "import os\nprint(os.path.exists('ran'))")
    api.await_status(running, "running")

    response = answer(api.http.post(f"{V1}/executions/{waiting}/cancel"))
    assert response["status"] == "cancelled"
    assert api.result(waiting, wait=0)["error"]["code"] == "cancelled"
    assert api.status(running) == "running"
    api.put(session, "go")
    assert api.result(after)["stdout"] == "False\n"


def test_an_ended_execution_cannot_be_cancelled(api: Api, session: str) -> None:
    execution_id = api.run(session, "print(1)")["execution_id"]
    refused = problem(
        api.http.post(f"{V1}/executions/{execution_id}/cancel"), 409, "execution_ended"
    )

    assert refused["status_now"] == "completed"
    assert api.status(execution_id) == "completed"


# Events


@pytest.mark.every_driver
def test_output_is_streamed_before_the_execution_ends(api: Api, session: str) -> None:
    code = "import sys\nprint('first')\n" + until("go") + "print('last', file=sys.stderr)"
    execution_id = api.submit(session, code)
    received: list[tuple[str, dict[str, Any]]] = []
    for _, name, data in api.events(execution_id):
        if name != "queued":
            received.append((name, data))
        if name == "stdout":
            assert api.status(execution_id) == "running"
            api.put(session, "go")

    assert [name for name, _ in received] == ["started", "stdout", "stderr", "result"]
    assert received[1][1] == {"text": "first\n"}
    assert received[2][1] == {"text": "last\n"}
    assert received[3][1] == api.result(execution_id, wait=0)


def test_events_of_an_ended_execution_are_replayed(api: Api, session: str) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(4)"
    execution_id = api.run(session, code)["execution_id"]
    events = list(api.events(execution_id))

    assert [(name, data.get("text")) for _, name, data in events[:-1]] == [
        ("started", None),
        ("stdout", "out\n"),
        ("stderr", "err\n"),
    ]
    assert (events[-1][1], events[-1][2]["exit_code"]) == ("result", 4)


def test_a_resumed_stream_neither_skips_nor_repeats_events(api: Api, session: str) -> None:
    code = "print('one')\n" + until("two") + "print('two')\n" + until("end") + "print('three')"
    execution_id = api.submit(session, code)
    last = next(number for number, name, _ in api.events(execution_id) if name == "stdout")
    api.put(session, "two")
    events = api.events(execution_id, after=last)
    last, name, data = next(event for event in events if event[1] != "queued")
    assert (name, data) == ("stdout", {"text": "two\n"})
    api.put(session, "end")
    api.result(execution_id)

    assert [(name, data.get("text")) for _, name, data in api.events(execution_id, after=last)] == [
        ("stdout", "three\n"),
        ("result", None),
    ]


def test_a_client_that_resumes_after_many_events_still_receives_the_result(
    api: Api, session: str
) -> None:
    code = "".join(until(f"go{n}") + f"print({n})\n" for n in range(20))
    execution_id = api.submit(session, code)
    ids, text = [], ""
    for number, name, data in api.events(execution_id):
        if name == "stdout":
            ids.append(number)
            text += data["text"]
            if len(ids) == 10:
                break
        if name in ("started", "stdout"):
            # One line after the other, or several are one event.
            api.put(session, f"go{len(ids)}")
    assert len(ids) == 10
    for n in range(10, 20):
        api.put(session, f"go{n}")
    api.result(execution_id)
    rest = list(api.events(execution_id, after=ids[-1]))

    text += "".join(data["text"] for _, name, data in rest if name == "stdout")
    assert text == "".join(f"{n}\n" for n in range(20))
    assert rest[-1][1] == "result"


def test_output_that_is_not_utf8_is_streamed_unchanged(api: Api, session: str) -> None:
    code = "import sys\nsys.stdout.buffer.write(b'\\xff\\x00\\xfe')"
    execution_id = api.run(session, code)["execution_id"]
    received = b"".join(
        base64.b64decode(data["base64"]) if "base64" in data else data["text"].encode()
        for _, name, data in api.events(execution_id)
        if name == "stdout"
    )

    assert received == b"\xff\x00\xfe"


def test_a_malformed_event_id_is_refused(api: Api, session: str) -> None:
    execution_id = api.run(session, "print(1)")["execution_id"]
    response = api.http.get(
        f"{V1}/executions/{execution_id}/events", headers={"Last-Event-ID": "nonsense"}
    )

    problem(response, 422, "invalid_request")


# The list


def test_executions_are_listed_newest_first_page_by_page(api: Api, session: str) -> None:
    made = [api.run(session, f"print({number})")["execution_id"] for number in range(7)]
    listed: list[str] = []
    cursor: str | None = None
    pages = 0
    while True:
        params = {"limit": 3} | ({} if cursor is None else {"cursor": cursor})
        page = answer(api.http.get(f"{V1}/sessions/{session}/executions", params=params))
        listed += [item["id"] for item in page["items"]]
        pages += 1
        cursor = page["next_cursor"]
        if cursor is None:
            break

    assert listed == made[::-1]
    assert pages == 3


def test_executions_are_listed_by_status(api: Api, session: str) -> None:
    good = api.run(session, "pass")["execution_id"]
    bad = api.run(session, "raise SystemExit(1)")["execution_id"]

    def ids(status: str) -> list[str]:
        url = f"{V1}/sessions/{session}/executions"
        return [
            item["id"] for item in answer(api.http.get(url, params={"status": status}))["items"]
        ]

    assert ids("completed") == [good]
    assert ids("failed") == [bad]
    assert ids("cancelled") == []
    url = f"{V1}/sessions/{session}/executions?status=tired"
    problem(api.http.get(url), 422, "invalid_request")


def test_an_invalid_cursor_is_refused(api: Api, session: str) -> None:
    url = f"{V1}/sessions/{session}/executions"
    for cursor in ("nonsense", "", "%00", "é", "x" * 5000):
        response = api.http.get(url, params={"cursor": cursor})
        problem(response, 400, "bad_cursor")


def test_timestamps_of_an_execution_are_in_order(api: Api, session: str) -> None:
    execution_id = api.run(session, "pass")["execution_id"]
    shown = api.execution(execution_id)
    times = [
        datetime.fromisoformat(shown[name]) for name in ("created_at", "started_at", "completed_at")
    ]

    assert times == sorted(times)


def test_a_background_process_does_not_delay_the_result(api: Api, session: str) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '100'])\nprint('done')"

    assert api.run(session, code)["stdout"] == "done\n"
    assert api.run(session, "print(1)")["stdout"] == "1\n"


def test_background_processes_are_listed_and_can_be_ended(api: Api, session: str) -> None:
    url = f"{V1}/sessions/{session}/processes"
    assert answer(api.http.get(url))["items"] == []
    code = "import subprocess\nsubprocess.Popen(['sleep', '1000'])"
    execution_id = api.run(session, code)["execution_id"]
    (left,) = answer(api.http.get(url))["items"]

    assert left["execution_id"] == execution_id
    assert "sleep" in str(left)
    assert answer(api.http.delete(url))["items"] == [left]
    eventually(lambda: answer(api.http.get(url))["items"] == [])
    assert api.run(session, "print(1)")["stdout"] == "1\n"


def test_an_unfinished_execution_is_listed_as_running(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go"))
    path = f"{V1}/sessions/{session}/executions"

    def running() -> list[str]:
        return [
            item["id"] for item in answer(api.http.get(path, params={"status": "running"}))["items"]
        ]

    eventually(lambda: running() == [execution_id])
    api.put(session, "go")
    assert api.result(execution_id)["status"] == "success"
    assert running() == []
