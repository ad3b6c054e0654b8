from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.component.cli.conftest import Command, Start
    from tests.component.sdk.fake_server import FakeServer

HELD = json.dumps({"out": [["stdout", "hi"]], "hold": True})


@pytest.fixture
def session(atoll: Command, fake_server: FakeServer) -> str:
    return atoll("session", "create", "--capacity", "3").stdout.strip()


def begin(atoll: Command, session: str, **script: Any) -> str:
    """Start an execution in the background; returns its id."""
    code = json.dumps(script)
    return atoll("session", "exec", session, "--no-follow", "--code", code).stdout.strip()


def test_an_execution_is_started_without_following_it(
    atoll: Command, fake_server: FakeServer, session: str
) -> None:
    assert fake_server.bodies[0] == {"capacity": 3}
    words = ("session", "exec", session, "--no-follow", "--execution-id", "mine", "-c", HELD)
    assert atoll(*words).stdout == "mine\n"
    assert json.loads(atoll(*words, "--json").stdout)["status"] == "running"
    assert list(fake_server.executions) == ["mine"]


def test_executions_are_listed_and_shown(atoll: Command, session: str) -> None:
    begin(atoll, session)
    held = begin(atoll, session, hold=True)
    assert held in atoll("execution", "list").stdout
    listed = atoll("execution", "list", "--status", "running", "--session", session, "--json")
    assert [one["id"] for one in json.loads(listed.stdout)] == [held]
    assert len(json.loads(atoll("execution", "list", "--limit", "1", "--json").stdout)) == 1
    assert "node_lost" in atoll("execution", "show", held).stdout
    shown = json.loads(atoll("execution", "show", held, "--json").stdout)
    assert shown["attempts"][0]["cause"] == "node_lost"


def test_events_are_printed_one_per_line(atoll: Command, session: str) -> None:
    one = begin(atoll, session, events=[["queued", {"ahead": 1}]], out=[["stdout", "\x1b[2J\n"]])
    lines = atoll("execution", "events", one).stdout.splitlines()
    assert lines[0] == '1 queued {"ahead": 1}'
    assert lines[2] == '3 stdout {"text": "\\u001b[2J\\n"}'
    events = [
        json.loads(line)
        for line in atoll("execution", "events", one, "--after", "2", "--json").stdout.splitlines()
    ]
    assert [(line["id"], line["event"]) for line in events] == [(3, "stdout"), (4, "result")]
    assert events[1]["status"] == "success"


def test_an_interrupted_follow_leaves_the_execution_running(
    start: Start, atoll: Command, fake_server: FakeServer, session: str
) -> None:
    held = begin(atoll, session, out=[["stdout", "hi"]], hold=True)
    process = start("execution", "follow", held)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"hi"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, f"atoll: {held} continues.\n".encode())
    assert not fake_server.executions[held].cancelled
    failed = begin(atoll, session, result={"status": "failed", "exit_code": 7})
    assert atoll("execution", "follow", failed).exit_code == 7


def test_an_execution_is_cancelled_with_a_reason(
    atoll: Command, fake_server: FakeServer, session: str
) -> None:
    held = begin(atoll, session, hold=True)
    assert atoll("execution", "cancel", held, "--reason", "enough").stdout == "cancelled\n"
    assert fake_server.executions[held].reason == "enough"
    done = begin(atoll, session)
    atoll("execution", "follow", done)
    assert json.loads(atoll("execution", "cancel", done, "--json").stdout)["status"] == "completed"


def test_messages_and_input_reach_running_code(
    atoll: Command, start: Start, fake_server: FakeServer, session: str
) -> None:
    held = begin(atoll, session, hold=True)
    assert atoll("execution", "inject", held, "hello").exit_code == 0
    process = start("execution", "inject", held, "--stdin", "--eof", stdin=subprocess.PIPE)
    process.communicate(b"data\xff")
    injected = fake_server.executions[held].injected
    assert injected[0] == {"message": "hello"}
    assert b"".join(b64decode(one["stdin_base64"]) for one in injected[1:]) == b"data\xff"
    assert injected[-1]["eof"] is True
    assert atoll("execution", "inject", held).exit_code == 2
    assert atoll("execution", "inject", held, "x", "--stdin").exit_code == 2


def test_a_question_is_answered_by_another_process(
    atoll: Command, fake_server: FakeServer, session: str
) -> None:
    one = begin(atoll, session, ask=["a", "b"])
    answer = ("execution", "approve", one, "--answer", '{"n": 1}', "--approval-id", "1")
    assert atoll(*answer).stdout == "running\n"
    while (question := fake_server.executions[one].question) is None or question["id"] != "2":
        atoll("execution", "show", one)
    assert atoll("execution", "refuse", one, "--reason", "no").exit_code == 0
    done = atoll("execution", "follow", one)
    assert 'handler returned [{"approved": true, "answer": {"n": 1}}' in done.stderr
    late = atoll("execution", "approve", one)
    assert (late.exit_code, "(no_approval)" in late.stderr) == (1, True)
    assert atoll("execution", "approve", one, "--answer", "{").exit_code == 2


@pytest.mark.parametrize(("typed", "approved"), [("y\n", True), ("\n", False)], ids=["yes", "no"])
def test_a_question_is_asked_on_the_terminal(
    fake_server: FakeServer, session: str, typed: str, approved: bool
) -> None:
    ours, theirs = pty.openpty()
    code = json.dumps({"ask": ["Delete \x1b[2J?"]})
    words = [sys.executable, "-m", "atoll.cli", "session", "exec", "--no-stdin", session]
    process = subprocess.Popen(
        [*words, "--code", code], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    with process:
        try:
            seen = b""
            while b"[y/N] " not in seen:
                seen += os.read(ours, 1000)
            assert b"approval requested: Delete \\x1b[2J? [1]" in seen
            os.write(ours, typed.encode())
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)
    (execution,) = fake_server.executions.values()
    assert execution.answers == [{"approved": approved}]


def test_without_a_terminal_a_notice_explains_how_to_answer(
    start: Start, fake_server: FakeServer, session: str, atoll: Command
) -> None:
    process = start("session", "exec", session, "--code", json.dumps({"ask": ["Go on?"]}))
    assert process.stderr is not None
    assert process.stderr.readline() == b"atoll: approval requested: Go on? [1]\n"
    hint = process.stderr.readline().decode()
    (execution_id,) = fake_server.executions
    assert f"atoll execution approve {execution_id}" in hint
    atoll("execution", "approve", execution_id)
    process.communicate()
    assert process.returncode == 0


def test_a_lost_attempt_causes_a_note(atoll: Command, session: str) -> None:
    retry = {"attempt": 2, "cause": "node_lost", "message": None, "delay": 1}
    one = begin(atoll, session, events=[["retry", retry]])
    assert "attempt 1 was lost (node_lost)" in atoll("execution", "follow", one).stderr
    assert atoll("execution", "follow", one, "--json").stderr == ""


@pytest.mark.parametrize("returned", ['{"n": 1}', '"é\\u001b"', "0", "false", "[]"])
def test_the_return_value_of_a_function_is_on_stdout(
    atoll: Command, session: str, returned: str
) -> None:
    done = atoll("invocation", "invoke", session, "jobs:main", "-i", returned)
    assert (done.stdout, done.stderr) == (f"{returned}\n", "atoll: jobs:main returned:\n")


def test_a_function_that_returns_nothing_prints_nothing(atoll: Command, session: str) -> None:
    done = atoll("invocation", "invoke", session, "jobs:main")
    assert (done.stdout, done.stderr) == ("", "")


def test_an_invocation_can_be_made_and_listed(
    atoll: Command, fake_server: FakeServer, session: str
) -> None:
    invoke = ("invocation", "invoke", session)
    done = atoll(
        *invoke, "jobs:main", "-i", '{"n": 1}', "-m", "who=me", "-t", "5", "--invocation-id", "mine"
    )
    assert done.exit_code == 0, done.output
    assert fake_server.bodies[-1] == {
        "session_id": session,
        "mode": "async",
        "function_name": "jobs:main",
        "input": {"n": 1},
        "timeout_ms": 5000,
        "metadata": {"who": "me"},
        "invocation_id": "mine",
    }
    assert "jobs:main" in atoll("invocation", "list").stdout
    assert json.loads(atoll("invocation", "show", "mine", "--json").stdout)["status"] == "succeeded"
    assert "who=me" in atoll("invocation", "show", "mine").stdout
    held = atoll(*invoke, "--code", HELD, "--no-follow").stdout.strip()
    listed = atoll("invocation", "list", "--status", "running", "--session", session, "--json")
    assert [one["invocation_id"] for one in json.loads(listed.stdout)] == [held]
    assert atoll("invocation", "cancel", held, "--reason", "enough").stdout == "cancelled\n"
    assert fake_server.invocations[held].reason == "enough"
    assert atoll(*invoke).exit_code == 2
    assert atoll(*invoke, "f", "-m", "x").exit_code == 2
    assert atoll(*invoke, "f", "-i", "{").exit_code == 2
