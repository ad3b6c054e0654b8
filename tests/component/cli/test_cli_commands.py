from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from atoll.version import __version__
from tests.component.sdk.fake_server import problem

if TYPE_CHECKING:
    from pathlib import Path

    from tests.component.cli.conftest import Command, Start
    from tests.component.sdk.fake_server import FakeServer


def test_a_session_is_created_shown_listed_and_ended(
    atoll: Command, fake_server: FakeServer
) -> None:
    made = atoll("session", "create", "--template", "python", "--timeout", "60", "-e", "A=1")
    session_id = made.stdout.strip()
    assert fake_server.bodies == [{"template_id": "python", "timeout": 60, "env_vars": {"A": "1"}}]
    assert session_id in atoll("session", "list").stdout
    assert json.loads(atoll("session", "list", "--json").stdout)[0]["id"] == session_id
    assert "cpu=1, memory=512Mi" in atoll("session", "show", session_id).stdout
    shown = json.loads(atoll("session", "show", session_id, "--json").stdout)
    assert shown["resources"]["memory"] == "512Mi"
    assert shown["created_at"] == "2024-05-01T12:00:00Z"
    assert atoll("session", "rm", session_id).stdout == f"{session_id}\n"
    assert atoll("session", "list", "--status", "running", "--json").stdout == "[]\n"


def test_a_long_list_is_cut_at_its_limit(atoll: Command, fake_server: FakeServer) -> None:
    for _ in range(5):
        atoll("session", "create")
    assert len(json.loads(atoll("session", "list", "--limit", "3", "--json").stdout)) == 3


def test_a_piped_table_is_not_wrapped(
    start: Start, fake_server: FakeServer, atoll: Command
) -> None:
    atoll("session", "create", "--template", "t" * 63)
    out, _ = start("session", "list").communicate()
    assert b"t" * 63 in out


def test_a_command_or_code_is_run_in_a_session(atoll: Command, fake_server: FakeServer) -> None:
    session_id = atoll("session", "create").stdout.strip()
    assert atoll("session", "exec", session_id, "--", "ls", "-l").stdout == "ls -l"
    assert atoll("session", "exec", session_id, "--code", "print(1)").stdout == "print(1)"
    failed = json.dumps({"result": {"status": "failed", "exit_code": 7}})
    assert atoll("session", "exec", session_id, "-c", failed).exit_code == 7
    assert atoll("session", "exec", session_id).exit_code == 2
    assert fake_server.sessions[session_id]["status"] == "running"


def test_ctrl_c_cancels_the_execution_and_leaves_the_session(
    start: Start, atoll: Command, fake_server: FakeServer
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    script = json.dumps({"out": [["stdout", "hi"]], "hold": True})
    process = start("session", "exec", session_id, "--code", script)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"hi"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    (execution,) = fake_server.executions.values()
    assert err.decode() == f"atoll: {execution.id} was cancelled.\n"
    assert execution.cancelled
    assert fake_server.sessions[session_id]["status"] == "running"


def test_templates_are_created_shown_listed_and_removed(
    atoll: Command, fake_server: FakeServer
) -> None:
    done = atoll(
        "template", "create", "Science", "--id", "science", "--preload", "numpy", "--preload", "os",
        "--memory", "1Gi", "--require", "seccomp",
    )  # fmt: skip
    assert done.stdout == "science\n"
    assert fake_server.bodies == [
        {
            "name": "Science",
            "id": "science",
            "preload": ["numpy", "os"],
            "security_context": {"require": ["seccomp"]},
        }
    ]
    assert "1Gi" in atoll("template", "list").stdout
    assert json.loads(atoll("template", "show", "science", "--json").stdout)["name"] == "Science"
    assert "numpy, os" in atoll("template", "show", "science").stdout
    assert atoll("template", "rm", "science").exit_code == 0
    gone = atoll("template", "show", "science")
    assert gone.exit_code == 1
    assert gone.stderr == "error: There is no template science. (template_not_found)\n"


def test_nodes_are_listed_and_shown(atoll: Command, fake_server: FakeServer) -> None:
    assert "25%" in atoll("node", "list").stdout
    assert "no loop devices" in atoll("node", "show", "local").stdout
    assert json.loads(atoll("nodes", "show", "local", "--json").stdout)["cpu_count"] == 2


def test_a_node_is_cordoned_drained_and_removed(atoll: Command, fake_server: FakeServer) -> None:
    assert atoll("node", "cordon", "local").stdout == "healthy, cordoned\n"
    assert "healthy, cordoned" in atoll("node", "list").stdout
    assert atoll("node", "uncordon", "local").stdout == "healthy\n"
    assert atoll("node", "drain", "local").stdout == "draining: 2 of 2 sessions left\n"
    done = atoll("node", "drain", "local", "--wait")
    assert (done.exit_code, done.stdout) == (0, "drained\n")
    assert "atoll: draining: 1 of 2 sessions left\n" in done.stderr
    assert json.loads(atoll("node", "drain", "local", "--json").stdout)["drain"]
    assert atoll("node", "rm", "local").stdout == "local\n"
    assert fake_server.removed_nodes == ["local"]


def test_a_slow_drain_times_out(atoll: Command, fake_server: FakeServer) -> None:
    done = atoll("node", "drain", "local", "--wait", "--timeout", "0")
    assert done.exit_code == 1
    assert "Node local still has 1 session(s). (drain_timeout)" in done.stderr


def test_an_error_is_one_line_without_control_characters(
    atoll: Command, fake_server: FakeServer
) -> None:
    fake_server.failure = problem(409, "some_code", "\x1b[2Jgone")
    done = atoll("session", "list")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: \\x1b[2Jgone (some_code)\n"
    fake_server.failure = problem(409, "code\x1b[2J\nerror: forged", "gone\nerror: forged")
    done = atoll("session", "list")
    assert done.stderr == ("error: gone\n    error: forged (code\\x1b[2J\\nerror: forged)\n"), (
        "what a server says cannot be taken for a line of this program"
    )


def test_the_error_for_a_missing_server_contains_advice(atoll: Command) -> None:
    done = atoll("session", "list", "--url", "http://127.0.0.1:9", "--api-key", "k" * 20)
    assert done.exit_code == 1
    assert re.fullmatch(r"error: No server answers at \S+ .*atoll serve.*\n", done.stderr)


def test_version_and_help_import_little(atoll: Command) -> None:
    assert atoll("version").stdout.startswith(f"atoll {__version__}")
    assert json.loads(atoll("version", "--json").stdout)["atoll"] == __version__
    code = (
        "import sys; from atoll.cli import commands;"
        "assert not {'httpx', 'pydantic', 'asyncio', 'rich.table', 'fastapi'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["serve", "doctor", "key list"])
def test_an_error_contains_the_wrong_setting(
    atoll: Command, monkeypatch: pytest.MonkeyPatch, command: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOLL_PORT", "many")
    done = atoll(*command.split(), "--data-dir", str(tmp_path))
    assert done.exit_code == 1
    assert done.stderr.startswith("error: port: ")
    assert done.stderr.endswith("(invalid_setting)\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("atoll session show ", "sess_0000"), ("atoll session create --template sci", "science")],
    ids=["session", "template"],
)
def test_ids_are_completed(
    atoll: Command, fake_server: FakeServer, line: str, expected: str
) -> None:
    atoll("session", "create")
    atoll("template", "create", "Science", "--id", "science")
    # Of a server that is hostile: the shell would run it.
    fake_server.templates["sci$(reboot)"] = fake_server.templates["science"] | {
        "id": "sci$(reboot)"
    }
    shell = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": line}
    shell["COMP_CWORD"] = str(len(line.split(" ")) - 1)
    patient = "from atoll.cli import completion, main; completion._TIMEOUT = 60; main()"
    done = subprocess.run(
        [sys.executable, "-c", patient],
        env={**os.environ, **shell}, capture_output=True, text=True,
    )  # fmt: skip
    assert expected in done.stdout.split(), done
    assert "reboot" not in done.stdout


def test_completion_without_a_server_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {
        "_ATOLL_COMPLETE": "complete_bash",
        "COMP_WORDS": "atoll session show ",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from atoll.cli import main; main()"],
        env={**os.environ, **shell, "ATOLL_URL": "http://127.0.0.1:9"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("", "")
