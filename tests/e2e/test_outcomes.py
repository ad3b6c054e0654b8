"""Each way to end has its own outcome, metrics and artifacts."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, answer, problem, until

if TYPE_CHECKING:
    from tests.e2e.api import Api

pytestmark = pytest.mark.quick


def returning(value: str) -> str:
    return f"def handler(event):\n    return {value}\n"


OUTCOMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a handler's value": (
        {"code": returning("[1, 2.5, None, True, {'ä': 'ü'}]")},
        {"status": "success", "exit_code": 0, "return_value": [1, 2.5, None, True, {"ä": "ü"}]},
    ),
    "a handler without an event gets an empty one": (
        {"code": returning("event")},
        {"status": "success", "return_value": {}},
    ),
    "an event that is not an object": (
        {"code": returning("event"), "event": [1, "two"]},
        {"status": "success", "return_value": [1, "two"]},
    ),
    "an event that is null": (
        {"code": returning("event is None"), "event": None},
        {"status": "success", "return_value": True},
    ),
    "a coroutine as handler": (
        {"code": "import asyncio\nasync def handler(event):\n    return await asyncio.sleep(0, 7)"},
        {"status": "success", "return_value": 7},
    ),
    "a handler that returns nothing": (
        {"code": "def handler(event):\n    print('seen')"},
        {"status": "success", "return_value": None, "stdout": "seen\n"},
    ),
    "a script": (
        {"code": "if __name__ == '__main__':\n    print(6 * 7)"},
        {"status": "success", "stdout": "42\n", "return_value": None, "error": None},
    ),
    "a handler that is no function": (
        {"code": "handler = 3\nprint(handler)"},
        {"status": "success", "stdout": "3\n", "return_value": None},
    ),
    "no code at all": ({"code": ""}, {"status": "success", "stdout": "", "exit_code": 0}),
    "sys.exit(0)": (
        {"code": "import sys\nsys.exit(0)"},
        {"status": "success", "exit_code": 0, "cause": None},
    ),
    "sys.exit(3)": (
        {"code": "import sys\nsys.exit(3)"},
        {"status": "failed", "exit_code": 3, "cause": "exit", "error.code": "exit"},
    ),
    "sys.exit('words')": (
        {"code": "import sys\nsys.exit('words')"},
        {"status": "failed", "exit_code": 1, "cause": "exit", "stderr": "words\n"},
    ),
    "os._exit(7)": (
        {"code": "import os\nos._exit(7)"},
        {"status": "failed", "exit_code": 7, "cause": "exit"},
    ),
    "an exception": (
        {"code": "def deep():\n    raise KeyError('k')\ndeep()"},
        {"status": "failed", "exit_code": 1, "cause": "exit", "error.code": "exception",
         "error.name": "KeyError", "error.message": "'k'"},
    ),
    "an exception in a handler": (
        {"code": "def handler(event):\n    return 1 / 0"},
        {"status": "failed", "error.code": "exception", "error.name": "ZeroDivisionError",
         "error.message": "division by zero", "return_value": None},
    ),
    "a syntax error": (
        {"code": "def ("},
        {"status": "failed", "exit_code": 1, "error.name": "SyntaxError"},
    ),
    "a value that is not JSON": (
        {"code": returning("{1, 2}")},
        {"status": "failed", "exit_code": 1, "cause": "exit", "return_value": None,
         "error.code": "return_value_not_json"},
    ),
    "a value that JSON has no word for": (
        {"code": returning("float('nan')")},
        {"status": "failed", "error.code": "return_value_not_json"},
    ),
    "a value that holds itself": (
        {"code": "def handler(event):\n    x = []\n    x.append(x)\n    return x"},
        {"status": "failed", "error.code": "return_value_not_json"},
    ),
    "a value that is too large": (
        {"code": returning("'x' * (1 << 20)")},
        {"status": "failed", "error.code": "return_value_too_large", "return_value": None},
    ),
    "an interpreter that is not there": (
        {"command": ["no-such-interpreter", "x.py"]},
        {"status": "failed", "exit_code": 127, "cause": "exit", "error.code": "command_not_found"},
    ),
    "a file that cannot be executed": (
        {"command": ["/etc/passwd"]},
        {"status": "failed", "exit_code": 126, "error.code": "not_executable"},
    ),
    "a segmentation fault": (
        {"code": "import ctypes\nctypes.string_at(0)"},
        {"status": "failed", "exit_code": 139, "cause": "signal", "signal": "SIGSEGV",
         "error.code": "signal"},
    ),
    "a process that ends itself": (
        {"code": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"},
        {"status": "failed", "exit_code": 137, "cause": "signal", "signal": "SIGKILL"},
    ),
    "an endless loop": (
        {"code": "while True: pass", "timeout": 0.3},
        {"status": "timeout", "exit_code": 124, "cause": "timeout", "error.code": "timeout"},
    ),
    "an endless sleep in a command": (
        {"command": ["sleep", "1000"], "timeout": 0.3},
        {"status": "timeout", "exit_code": 124, "cause": "timeout"},
    ),
    "an endless loop that ignores signals": (
        {"code": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on')\n"
                 "while True: pass", "timeout": 3},
        {"status": "timeout", "stdout": "on\n"},
    ),
    "a working directory that is not there": (
        {"code": "print(1)", "cwd": "nowhere"},
        {"status": "failed", "exit_code": 1, "error.code": "bad_cwd", "stdout": ""},
    ),
    "a command that fails": (
        {"command": ["false"]},
        {"status": "failed", "exit_code": 1, "cause": "exit", "error.code": "exit"},
    ),
    "a shell script that fails": (
        {"code": "echo out; echo err >&2; exit 9", "language": "shell"},
        {"status": "failed", "exit_code": 9, "stdout": "out\n", "stderr": "err\n"},
    ),
}  # fmt: skip


def value_at(result: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        result = result[part]
    return result


@pytest.fixture(scope="module")
def shared(api: Api) -> str:
    """One session for all cases: none may affect the next."""
    return str(api.create(timeout=3600)["id"])


@pytest.mark.parametrize(("request_", "expected"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_every_way_to_end_has_its_own_outcome(
    api: Api, shared: str, request_: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = api.run(shared, **request_)

    assert {name: value_at(result, name) for name in expected} == expected


@pytest.mark.parametrize(("request_", "expected"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_the_record_equals_the_response(
    api: Api, shared: str, request_: dict[str, Any], expected: dict[str, Any]
) -> None:
    answered = api.run(shared, **request_)
    execution_id = answered["execution_id"]
    record = api.execution(execution_id)

    assert api.result(execution_id, wait=0) == answered
    words = {"success": "completed", "failed": "failed", "timeout": "timeout"}
    assert record["status"] == words[answered["status"]]
    for name in ("stdout", "stderr", "exit_code", "return_value", "error", "cause", "metrics"):
        assert record[name] == answered[name]


def test_a_traceback_shows_only_the_code_of_the_user(api: Api, shared: str) -> None:
    result = api.run(shared, "def deep():\n    raise ValueError('here')\n\ndeep()\n")

    trace = result["error"]["traceback"]
    assert trace == result["stderr"]
    assert "line 4, in <module>" in trace
    assert "raise ValueError('here')" in trace
    assert "atoll" not in trace


def test_a_failed_handler_keeps_its_output(api: Api, shared: str) -> None:
    result = api.run(shared, "def handler(event):\n    print('before')\n    raise OSError")

    assert result["stdout"] == "before\n"
    assert result["return_value"] is None


def test_invalid_utf8_in_output_is_replaced(api: Api, shared: str) -> None:
    result = api.run(shared, "import sys\nsys.stdout.buffer.write(b'a\\xff\\x00b')")

    assert result["stdout"] == "a�\0b"
    assert result["stdout_bytes"] == 4


def test_output_beyond_the_limit_is_truncated_and_its_full_size_reported(
    api: Api, shared: str
) -> None:
    result = api.run(shared, "print('x' * 3_000_000)")

    assert result["stdout"] == "x" * 2**20
    assert result["stdout_truncated"] is True
    assert result["stdout_bytes"] == 3_000_001
    assert result["stderr_truncated"] is False


# Metrics


def test_cpu_time_of_a_busy_loop_is_reported(api: Api, shared: str) -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass"
    metrics = api.run(shared, code)["metrics"]

    assert 250 <= metrics["cpu_time_ms"] <= 1000
    assert metrics["duration_ms"] >= metrics["cpu_time_ms"] * 0.8


def test_sleeping_uses_time_but_no_cpu(api: Api, shared: str) -> None:
    asked = time.monotonic()
    metrics = api.run(shared, "import time\ntime.sleep(0.3)")["metrics"]
    most = (time.monotonic() - asked) * 1000

    assert metrics["cpu_time_ms"] < 150
    assert 300 <= metrics["duration_ms"] <= most


def test_peak_memory_of_an_allocation_is_reported(api: Api, shared: str) -> None:
    small = api.run(shared, "pass")["metrics"]["peak_memory_mb"]
    large = api.run(shared, "x = b'x' * (100 << 20)")["metrics"]["peak_memory_mb"]

    assert 1 < small < 60
    assert 100 <= large < 200


def test_bytes_written_are_reported(api: Api, shared: str) -> None:
    code = (
        "import os\n"
        "with open('big', 'wb') as file:\n"
        "    file.write(os.urandom(8 << 20))\n"
        "    os.fsync(file.fileno())\n"
        "os.remove('big')\n"
    )
    metrics = api.run(shared, code)["metrics"]

    assert 8 << 20 <= metrics["bytes_written"] < 16 << 20
    assert metrics["bytes_read"] >= 0
    assert api.run(shared, "pass")["metrics"]["bytes_written"] < 1 << 20


# Artifacts


def test_artifacts_are_the_files_that_this_execution_wrote(api: Api, session: str) -> None:
    assert api.run(session, "open('a', 'w').write('1')")["artifacts"] == ["a"]
    assert api.run(session, "open('b', 'w').write('2')")["artifacts"] == ["b"]
    assert api.run(session, "print(open('a').read())")["artifacts"] == []
    assert api.run(session, "open('a', 'a').write('3')")["artifacts"] == ["a"]


def test_consecutive_executions_never_share_artifacts(api: Api, session: str) -> None:
    for number in range(40):
        result = api.run(session, f"open('file{number:02}', 'w').write('x')")
        assert result["artifacts"] == [f"file{number:02}"]
        assert api.run(session, "pass")["artifacts"] == []


def test_a_file_rewritten_with_the_same_content_counts_as_changed(api: Api, session: str) -> None:
    for _ in range(20):
        assert api.run(session, "open('same', 'w').write('same')")["artifacts"] == ["same"]


def test_a_file_removed_before_the_end_is_not_an_artifact(api: Api, session: str) -> None:
    api.run(session, "open('old', 'w').close()")
    code = "import os\nopen('brief', 'w').close()\nos.remove('brief')\nos.remove('old')"

    assert api.run(session, code)["artifacts"] == []


def test_uploads_are_not_artifacts(api: Api, session: str) -> None:
    for number in range(20):
        api.put(session, f"in/{number}", b"x")
        assert api.run(session, "pass")["artifacts"] == []


def test_files_moved_through_the_api_are_not_artifacts(api: Api, session: str) -> None:
    for number in range(20):
        api.put(session, "a", b"x")
        body = {"source": "a", "target": f"moved/{number}"}
        answer(api.http.post(f"{V1}/sessions/{session}/files/move", json=body))
        assert api.run(session, "pass")["artifacts"] == []


def test_a_file_uploaded_during_an_execution_is_not_its_artifact(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go") + "open('mine', 'w').close()")
    api.await_status(execution_id, "running")
    api.put(session, "other", b"x")
    api.put(session, "go")

    assert api.result(execution_id)["artifacts"] == ["mine"]


def test_an_upload_changed_by_the_execution_is_an_artifact(api: Api, session: str) -> None:
    api.put(session, "data", b"1")

    assert api.run(session, "open('data', 'a').write('2')")["artifacts"] == ["data"]


def test_artifacts_in_directories_are_listed_in_order_and_described(api: Api, session: str) -> None:
    code = (
        "import os\n"
        "os.makedirs('a/b/c')\n"
        "open('a/b/c/page.html', 'w').write('<p>ä</p>')\n"
        "open('a/plot.png', 'wb').write(b'\\x89PNG')\n"
        "open('z', 'wb').write(b'')\n"
        "os.symlink('z', 'link')\n"
    )
    result = api.run(session, code)
    artifacts = api.execution(result["execution_id"])["artifacts"]

    assert result["artifacts"] == ["a/b/c/page.html", "a/plot.png", "z"]
    assert [
        (item["path"], item["mime_type"], item["size"], item["checksum"]) for item in artifacts
    ] == [
        (path, kind, len(content), hashlib.sha256(content).hexdigest())
        for path, kind, content in (
            ("a/b/c/page.html", "text/html", "<p>ä</p>".encode()),
            ("a/plot.png", "image/png", b"\x89PNG"),
            ("z", "application/octet-stream", b""),
        )
    ]


def test_a_failed_execution_has_artifacts_too(api: Api, session: str) -> None:
    result = api.run(session, "open('partial', 'w').write('x')\nraise SystemExit(2)")

    assert result["artifacts"] == ["partial"]


@pytest.mark.parametrize(
    "end", ["while True: pass", "import os; os.kill(os.getpid(), 9)"], ids=["time-out", "signal"]
)
def test_an_aborted_execution_has_no_artifacts(api: Api, session: str, end: str) -> None:
    result = api.run(session, f"open('partial', 'w').write('x')\n{end}", timeout=0.5)

    assert result["artifacts"] == []
    assert api.run(session, "pass")["artifacts"] == []


def test_artifacts_beyond_the_limit_are_truncated_and_reported(api: Api, session: str) -> None:
    result = api.run(session, "for n in range(1005): open(f'{n:04}', 'w').close()")

    assert len(result["artifacts"]) == 1000
    assert result["artifacts_truncated"] is True


def test_a_value_that_is_nested_too_deep_is_refused_with_an_error(api: Api, session: str) -> None:
    code = "def handler(event):\n    r = []\n    for _ in range(event): r = [r]\n    return r"
    assert api.run(session, code, event=500)["status"] == "success"
    for depth in (512, 946, 960):
        result = api.run(session, code, event=depth)
        assert result["error"]["code"] == "return_value_not_json", depth
        assert api.execution(result["execution_id"])["status"] == "failed"


def test_the_command_of_an_execution_is_a_program_name(api: Api, session: str) -> None:
    problem(api.execute(session, command=[""]), 422, "invalid_request")
