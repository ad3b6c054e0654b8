from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest

from tests.component.sdk.fake_server import encoded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.component.cli.conftest import Command, Start
    from tests.component.sdk.fake_server import FakeServer


def script(**members: Any) -> str:
    return json.dumps(members)


def test_stdout_and_stderr_are_passed_through_byte_for_byte(
    start: Start, fake_server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "a.py"
    file.write_text(script(out=[["stderr", "err"]], raw=[["stdout", encoded(b"\xff\x00\r\n")]]))
    out, err = start("run", str(file)).communicate()
    assert (out, err) == (b"\xff\x00\r\n", b"err")
    (session,) = fake_server.sessions.values()
    assert session["status"] == "terminated"


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({}, 0),
        ({"status": "failed", "exit_code": 3}, 3),
        ({"status": "failed", "exit_code": None, "signal": "SIGSEGV", "cause": "signal"}, 139),
        ({"status": "timeout", "exit_code": None, "signal": "SIGKILL", "cause": "timeout"}, 124),
        ({"status": "error", "exit_code": None, "cause": "instance_lost"}, 1),
        ({"status": "failed", "exit_code": 0}, 1),
    ],
    ids=["success", "exit", "signal", "timeout", "lost", "no_code"],
)
def test_the_exit_code_is_that_of_the_program(
    atoll: Command, fake_server: FakeServer, result: dict[str, Any], code: int
) -> None:
    assert atoll("run", "--code", script(result=result)).exit_code == code


def test_errors_that_the_program_did_not_print_are_printed(
    atoll: Command, fake_server: FakeServer
) -> None:
    error = {"code": "not_json", "message": "handler() returned a set"}
    failed = {"status": "failed", "exit_code": 1, "error": error}
    output = atoll("run", "--code", script(result=failed))
    assert output.stderr == "error: handler() returned a set (not_json)\n"
    printed = [["stderr", "Traceback…\nhandler() returned a set\n"]]
    output = atoll("run", "--code", script(result=failed, out=printed))
    assert output.stderr == printed[0][1]
    error = {"code": "exit", "message": "The process ended with exit code 3."}
    exited = {"status": "failed", "exit_code": 3, "error": error}
    assert atoll("run", "--code", script(result=exited)).stderr == ""
    timeout = {"status": "timeout", "exit_code": None, "execution_time": 2.0}
    assert "(timeout)" in atoll("run", "--code", script(result=timeout)).stderr
    cut = atoll("run", "--code", script(out=[["stdout", "ab"]], result={"stdout_bytes": 9}))
    assert "2 of 9 bytes" in cut.stderr


def test_words_after_the_script_are_its_arguments(
    atoll: Command, fake_server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "a.sh"
    file.write_text("echo")
    done = atoll(
        "run", "-t", "500", "-e", "A=b=c", "--event", '{"n": 1}', "--memory", "1Gi",
        str(file), "--json", "-x", "y",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    # The session must outlive an execution that may take longer than sessions do by themselves.
    assert fake_server.bodies[0] == {"timeout": 560, "memory": "1Gi"}
    assert fake_server.bodies[1] == {
        "code": "echo",
        "language": "shell",
        "event": {"n": 1},
        "timeout": 500.0,
        "env": {"A": "b=c"},
        "args": ["--json", "-x", "y"],
        "execution_id": ANY,
    }


@pytest.mark.parametrize(
    ("name", "language"), [("a.py", "python"), ("a.JS", "javascript"), ("a.sh", "shell")]
)
def test_the_file_name_determines_the_language(
    atoll: Command, fake_server: FakeServer, tmp_path: Path, name: str, language: str
) -> None:
    (tmp_path / name).write_text("x")
    atoll("run", str(tmp_path / name))
    assert fake_server.bodies[1]["language"] == language


def test_a_script_on_stdin_is_run(start: Start, fake_server: FakeServer) -> None:
    process = start("run", "-", "arg", stdin=subprocess.PIPE)
    out, err = process.communicate(b"print(1)")
    assert (out, err, process.returncode) == (b"print(1)", b"", 0)
    sent = {"code": "print(1)", "language": "python", "args": ["arg"], "execution_id": ANY}
    assert fake_server.bodies[1] == sent


@pytest.mark.slow
def test_piped_input_becomes_the_stdin_of_the_program(
    start: Start, fake_server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("x")
    start("run", str(tmp_path / "a.py"), stdin=subprocess.PIPE).communicate(b"data")
    assert fake_server.bodies[1]["stdin"] == "data"
    start("run", "--no-stdin", str(tmp_path / "a.py"), stdin=subprocess.PIPE).communicate()
    assert "stdin" not in fake_server.bodies[3]


def test_a_command_is_run_unchanged(atoll: Command, fake_server: FakeServer) -> None:
    assert atoll("run", "--command", "--", "ls", "-l").stdout == "ls -l"
    assert fake_server.bodies[1] == {"command": ["ls", "-l"], "execution_id": ANY}


def test_json_output_is_the_result_only(atoll: Command, fake_server: FakeServer) -> None:
    done = atoll("run", "--json", "--event", "[1]", "--code", script(out=[["stdout", "x"]]))
    assert json.loads(done.stdout)["return_value"] == [1]
    assert json.loads(done.stdout)["stdout"] == "x"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl_c", "kill"]
)
def test_an_interrupt_cancels_the_execution_and_ends_the_session(
    start: Start, fake_server: FakeServer, number: signal.Signals, code: int
) -> None:
    process = start("run", "--code", script(out=[["stdout", "hi"]], hold=True))
    assert process.stdout is not None
    assert process.stdout.read(2) == b"hi"
    process.send_signal(number)
    _, err = process.communicate()
    (execution,) = fake_server.executions.values()
    output = f"atoll: {execution.id} was cancelled.\n" if number == signal.SIGINT else ""
    assert (process.returncode, err.decode()) == (code, output)
    assert execution.cancelled
    (session,) = fake_server.sessions.values()
    assert session["status"] == "terminated"


def test_a_closed_pipe_is_not_an_error(
    start: Start, fake_server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(script(out=[["stdout", "x" * 1000]] * 200))
    process = start("run", str(tmp_path / "a.py"))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")
    (session,) = fake_server.sessions.values()
    assert session["status"] == "terminated"


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "no_extension"],
        ["run", "--code", "x", "--command", "y"],
        ["run", "--event", "{", "--code", "x"],
        ["run", "--env", "=x", "--code", "x"],
        ["run", "--nonsense"],
    ],
    ids=["nothing", "no_language", "two", "no_json", "no_name", "unknown"],
)
def test_wrong_usage_exits_with_two(
    atoll: Command, fake_server: FakeServer, words: list[str]
) -> None:
    done = atoll(*words)
    assert done.exit_code == 2
    assert fake_server.requests == []


def test_an_unreadable_script_is_a_one_line_error(atoll: Command, tmp_path: Path) -> None:
    done = atoll("run", str(tmp_path / "none.py"))
    assert done.exit_code == 1
    assert done.stderr == f"error: {tmp_path}/none.py: No such file or directory (local_file)\n"
    (tmp_path / "b.py").write_bytes(b"\xff")
    assert "not UTF-8" in atoll("run", str(tmp_path / "b.py")).stderr
