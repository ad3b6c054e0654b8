"""Conversations with running code: stdin, messages, questions, and requests at the wrong time."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.e2e.test_recovery import calling, crash, kill_instance
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

pytestmark = pytest.mark.quick

ASK = (
    "from atoll_session import ask\nx = ask('Go?', {'n': 1})\nprint(x.approved, x.answer, x.reason)"
)
READ = (
    "import sys\nprint('ready', flush=True)\nfor line in sys.stdin.buffer: print(line, flush=True)"
)
"""Prints each line that it reads."""


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server for one test to kill."""
    with Server(tmp_path, ATOLL_POOL__SIZE="1", ATOLL_SHUTDOWN_TIMEOUT="1") as server:
        yield server


def inject(api: Api, execution_id: str, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/executions/{execution_id}/inject", json=fields)


def resume(api: Api, execution_id: str, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/executions/{execution_id}/resume", json=fields)


def cancel(api: Api, execution_id: str) -> httpx.Response:
    return api.http.post(f"{V1}/executions/{execution_id}/cancel")


def wait_for_question(api: Api, execution_id: str) -> dict[str, Any]:
    """Wait until it asks; the question."""
    return next(data for _, name, data in api.events(execution_id) if name == "approval")


def approval(api: Api, execution_id: str) -> Any:
    return api.execution(execution_id)["approval"]


def waits(api: Api, execution_id: str) -> None:
    """Wait until its question can be answered."""
    eventually(lambda: approval(api, execution_id) is not None)


# stdin


def test_stdin_is_written_until_it_is_closed(api: Api, session: str) -> None:
    execution_id = api.submit(session, READ, stdin="first\n", stdin_open=True)
    events = api.events(execution_id)
    output = (data["text"] for _, name, data in events if name == "stdout")
    text = next(output)
    while "first" not in text:
        text += next(output)
    for given, seen in (
        ({"stdin": "ä\n"}, "ä\n".encode()),
        ({"stdin_base64": base64.b64encode(b"\x00\xff\n").decode()}, b"\x00\xff\n"),
        ({"stdin": ""}, None),
        ({"stdin": "\n"}, b"\n"),
    ):
        assert answer(inject(api, execution_id, **given))["status"] == "running"
        if seen is not None:
            assert next(output) == f"{seen!r}\n"
    answer(inject(api, execution_id, stdin="last", eof=True))
    assert next(output) == f"{b'last'!r}\n"

    assert api.result(execution_id)["status"] == "success"


def test_closing_stdin_without_data_is_enough(api: Api, session: str) -> None:
    execution_id = api.submit(session, "import sys\nprint(sys.stdin.read())", stdin_open=True)
    api.await_status(execution_id, "running")
    answer(inject(api, execution_id, eof=True))

    assert api.result(execution_id)["stdout"] == "\n"


@pytest.mark.parametrize("stdin", [None, "given"], ids=["none", "given"])
def test_stdin_that_was_not_left_open_takes_no_input(
    api: Api, session: str, stdin: str | None
) -> None:
    execution_id = api.submit(session, until("go"), stdin=stdin)
    api.await_status(execution_id, "running")
    refused = problem(inject(api, execution_id, stdin="x"), 409, "stdin_closed")
    assert refused["status_now"] == "running"
    api.put(session, "go")
    assert api.result(execution_id)["status"] == "success"


def test_closed_stdin_takes_no_input(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go"), stdin_open=True)
    api.await_status(execution_id, "running")
    answer(inject(api, execution_id, stdin="x", eof=True))
    problem(inject(api, execution_id, stdin="x"), 409, "stdin_closed")
    api.put(session, "go")
    api.result(execution_id)


def test_unread_stdin_is_bounded(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go"), stdin_open=True)
    api.await_status(execution_id, "running")
    most = "x" * 1024 * 1024
    answer(inject(api, execution_id, stdin=most))
    refused = inject(api, execution_id, stdin=most)
    problem(refused, 429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    api.put(session, "go")
    assert api.result(execution_id)["status"] == "success"


# Messages


def test_messages_are_read_in_order_once(api: Api, session: str) -> None:
    code = (
        "from atoll_session import messages\nprint('ready', flush=True)\nseen = []\n"
        "while 'end' not in seen: seen += messages(20)\nprint(seen)"
    )
    execution_id = api.submit(session, code)
    next(name for _, name, _ in api.events(execution_id) if name == "stdout")
    given = ["one", "ä\n\0", "", "end"]
    for text in given:
        assert answer(inject(api, execution_id, message=text))["execution_id"] == execution_id

    assert api.result(execution_id)["stdout"] == f"ready\n{given}\n"


def test_unread_messages_are_bounded(api: Api, session: str) -> None:
    execution_id = api.submit(session, until("go"), timeout=300)
    api.await_status(execution_id, "running")
    for _ in range(1000):
        answer(inject(api, execution_id, message="x"))
    refused = inject(api, execution_id, message="x")
    problem(refused, 429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    api.put(session, "go")
    assert api.result(execution_id)["status"] == "success"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "message"),
        ({"eof": False}, "message"),
        ({"message": "a", "stdin": "b"}, "message"),
        ({"stdin": "", "stdin_base64": "", "eof": True}, "message"),
        ({"message": "a", "eof": True}, "eof"),
        ({"message": "x" * 65_537}, "message"),
        ({"message": "ä" * 40_000}, "message"),
        ({"message": 1}, "message"),
        ({"stdin": "ä" * 600_000}, "stdin"),
        ({"stdin_base64": "%"}, "stdin_base64"),
        ({"stdin_base64": "x" * 1_500_000}, "stdin_base64"),
        ({"text": "x"}, "text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_injection_is_refused(
    api: Api, session: str, body: dict[str, Any], field: str
) -> None:
    execution_id = api.submit(session, until("go"), stdin_open=True)
    api.await_status(execution_id, "running")
    refused = problem(inject(api, execution_id, **body), 422, "invalid_request")
    assert field in [item["field"] for item in refused["errors"]]
    api.put(session, "go")


# Requests at the wrong time or for unknown executions


SAID: list[tuple[str, dict[str, Any], str]] = [
    ("inject", {"message": "x"}, "execution_not_running"),
    ("inject", {"stdin": "x"}, "execution_not_running"),
    ("inject", {"eof": True}, "execution_not_running"),
    ("resume", {"approved": True}, "no_approval"),
    ("resume", {"approved": True, "approval_id": "1"}, "no_approval"),
]


@pytest.mark.parametrize(("verb", "body", "code"), SAID, ids=lambda value: str(value)[:30])
def test_a_request_to_an_execution_that_is_not_running_gets_its_status(
    api: Api, session: str, verb: str, body: dict[str, Any], code: str
) -> None:
    def refused(execution_id: str, code: str = code) -> str:
        url = f"{V1}/executions/{execution_id}/{verb}"
        return str(problem(api.http.post(url, json=body), 409, code)["status_now"])

    running = api.submit(session, until("go"))
    pending = api.submit(session, "pass", stdin_open=True)
    assert refused(pending) == "pending"
    api.await_status(running, "running")
    if verb == "resume":
        assert refused(running) == "running"
    answer(cancel(api, pending))
    assert refused(pending) == "cancelled"
    api.put(session, "go")
    api.result(running)
    assert refused(running) == "completed"
    assert refused(api.run(session, "1/0")["execution_id"]) == "failed"
    late = api.run(session, "while True: pass", timeout=0.1)["execution_id"]
    assert refused(late) == "timeout"


@pytest.mark.parametrize(("verb", "body", "code"), SAID, ids=lambda value: str(value)[:30])
def test_input_for_an_unknown_execution_or_ended_session_is_refused(
    api: Api, verb: str, body: dict[str, Any], code: str
) -> None:
    url = f"{V1}/executions/exec_nobody/{verb}"
    problem(api.http.post(url, json=body), 404, "execution_not_found")
    session = api.create()["id"]
    execution_id = api.submit(session, until("never"), stdin_open=True)
    api.await_status(execution_id, "running")
    api.end(session)
    eventually(lambda: api.status(execution_id) == "cancelled")
    url = f"{V1}/executions/{execution_id}/{verb}"
    assert problem(api.http.post(url, json=body), 409, code)["status_now"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "approved"),
        ({"approved": "perhaps"}, "approved"),
        ({"approved": None}, "approved"),
        ({"approved": True, "reason": 1}, "reason"),
        ({"approved": True, "approval_id": "../1"}, "approval_id"),
        ({"approved": True, "why": 1}, "why"),
    ],
    ids=str,
)
def test_an_invalid_answer_is_refused(api: Api, body: dict[str, Any], field: str) -> None:
    refused = problem(resume(api, "exec_nobody", **body), 422, "invalid_request")
    assert [item["field"] for item in refused["errors"]] == [field]


# Questions


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ({"approved": True}, "True None None"),
        ({"approved": True, "answer": {"a": [1, "ä", None]}}, "True {'a': [1, 'ä', None]} None"),
        ({"approved": False}, "False None None"),
        ({"approved": False, "reason": "too dear", "answer": 0}, "False 0 too dear"),
        ({"approved": True, "approval_id": "1"}, "True None None"),
    ],
    ids=str,
)
def test_a_person_answers(api: Api, session: str, given: dict[str, Any], printed: str) -> None:
    execution_id = api.submit(session, ASK)
    question = wait_for_question(api, execution_id)
    assert question == {
        "id": "1", "state": "asked", "question": "Go?", "data": {"n": 1},
        "timeout": question["timeout"],
    }  # fmt: skip
    waits(api, execution_id)
    shown = approval(api, execution_id)
    assert shown == {name: question[name] for name in ("id", "question", "data", "timeout")}
    assert answer(resume(api, execution_id, **given))["status"] == "running"

    assert api.result(execution_id)["stdout"] == f"{printed}\n"
    assert approval(api, execution_id) is None
    events = [data for _, name, data in api.events(execution_id) if name == "approval"]
    assert events[0] == question
    assert (events[1]["id"], events[1]["state"]) == ("1", "answered")
    assert (events[1]["approved"], events[1]["answer"]) == (given["approved"], given.get("answer"))
    late = resume(api, execution_id, approved=True)
    # Which of the two depends on how long ago it was answered.
    code = late.json()["code"]
    assert code in ("no_approval", "already_answered")
    assert problem(late, 409, code)["status_now"] == "completed"


def test_only_one_of_many_concurrent_answers_counts(api: Api, server: Server, session: str) -> None:
    execution_id = api.submit(session, ASK + "\n" + until("go"))
    waits(api, execution_id)

    def send_answer(number: int) -> tuple[int, int, str]:
        with server.client() as http:
            response = resume(Api(http), execution_id, approved=True, answer=number)
            return number, response.status_code, response.json().get("code", "")

    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(send_answer, range(8)))
    (good,) = [number for number, status, _ in responses if status == 200]
    assert {code for _, status, code in responses if status == 409} <= {"already_answered"}
    refused = problem(resume(api, execution_id, approved=False), 409, "already_answered")
    assert refused["status_now"] == "running"
    api.put(session, "go")

    assert api.result(execution_id)["stdout"] == f"True {good} None\n"


@pytest.mark.slow
def test_an_unanswered_question_is_refused_after_its_timeout(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path, ATOLL_EXECUTION__APPROVAL_TIMEOUT="0.3") as own, calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ASK)
        question = wait_for_question(api, execution_id)
        assert question["timeout"] == 0.3
        assert api.result(execution_id)["stdout"] == "False None timeout\n"
        events = [data for _, name, data in api.events(execution_id) if name == "approval"]
        assert (events[1]["state"], events[1]["reason"]) == ("refused", "timeout")
        problem(resume(api, execution_id, approved=True), 409, "no_approval")


def test_cancelling_an_execution_refuses_its_question(bubblewrap: str, tmp_path: Path) -> None:
    env = {"ATOLL_POOL__SIZE": "0", "ATOLL_EXECUTION__CANCEL_GRACE": "20"}
    with Server(tmp_path, **env) as own, calling(own) as api:
        session = api.create()["id"]
        code = f"import signal\nsignal.signal(15, signal.SIG_IGN)\n{ASK}\nprint('over')"
        execution_id = api.submit(session, code)
        waits(api, execution_id)
        assert answer(cancel(api, execution_id))["status"] == "cancelled"

        assert api.result(execution_id)["stdout"] == "False None cancelled\nover\n"
        events = [data for _, name, data in api.events(execution_id) if name == "approval"]
        assert (events[1]["state"], events[1]["reason"]) == ("refused", "cancelled")
        problem(resume(api, execution_id, approved=True), 409, "no_approval")
        api.end(session)


def test_questions_can_be_asked_in_turn_and_at_once(api: Api, session: str) -> None:
    code = (
        "import threading\nfrom atoll_session import ask\ngot = {}\n"
        "def go(n): got[n] = ask(str(n)).answer\n"
        "all = [threading.Thread(target=go, args=(n,)) for n in range(5)]\n"
        "[t.start() for t in all]; [t.join() for t in all]\nprint(sorted(got.items()))"
    )
    execution_id = api.submit(session, code)
    for _ in range(5):
        waits(api, execution_id)
        question = approval(api, execution_id)
        given = {"approved": True, "answer": f"to {question['question']}"}
        answer(resume(api, execution_id, **given, approval_id=question["id"]))
        other = resume(api, execution_id, approved=True, approval_id=question["id"])
        problem(other, 409, other.json()["code"])

        def moved(old: str = question["id"]) -> bool:
            now = approval(api, execution_id)
            return now is None or now["id"] != old

        eventually(moved)

    assert api.result(execution_id)["stdout"] == f"{[(n, f'to {n}') for n in range(5)]}\n"


def test_an_answer_that_is_too_large_is_refused(api: Api, session: str) -> None:
    execution_id = api.submit(session, ASK)
    waits(api, execution_id)
    for large in ("x" * 40_000, ["ä"] * 40_000):
        refused = resume(api, execution_id, approved=True, answer=large)
        error = problem(refused, 422, "invalid_request")
        assert [item["field"] for item in error["errors"]] == ["answer"]
    answer(resume(api, execution_id, approved=True))
    assert api.result(execution_id)["stdout"] == "True None None\n"


@pytest.mark.slow
def test_a_question_outlives_the_control_plane(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ASK, timeout=120)
        waits(api, execution_id)
        before = approval(api, execution_id)
    crash(own)
    with calling(own) as api:
        waits(api, execution_id)
        assert approval(api, execution_id) == before
        answer(resume(api, execution_id, approved=True, answer="after"))
        assert api.result(execution_id)["stdout"] == "True after None\n"
        events = [data["state"] for _, name, data in api.events(execution_id) if name == "approval"]
        assert events == ["asked", "answered"]


@pytest.mark.slow
def test_a_question_outlives_a_graceful_shutdown_of_the_control_plane(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ASK, timeout=120)
        waits(api, execution_id)
    assert own.stop() == 0
    own.start()
    with calling(own) as api:
        waits(api, execution_id)
        answer(resume(api, execution_id, approved=True, answer="after"))
        assert api.result(execution_id)["stdout"] == "True after None\n"


@pytest.mark.slow
def test_a_question_answered_before_a_restart_is_not_repeated(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ASK + "\n" + until("go"), timeout=120)
        waits(api, execution_id)
        answer(resume(api, execution_id, approved=True, answer="before"))
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
    crash(own)
    with calling(own) as api:
        api.await_status(execution_id, "running")
        assert approval(api, execution_id) is None
        problem(resume(api, execution_id, approved=False), 409, "no_approval")
        api.put(session, "go")
        assert api.result(execution_id)["stdout"] == "True before None\n"


@pytest.mark.slow
def test_a_question_ends_with_its_instance_and_is_repeated_by_the_next_attempt(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ASK, timeout=120)
        events = api.events(execution_id)
        next(data for _, name, data in events if name == "approval")
        waits(api, execution_id)
        kill_instance(own, api, session)
        next(name for _, name, _ in events if name == "retry")
        next(data for _, name, data in events if name == "approval")
        waits(api, execution_id)
        answer(resume(api, execution_id, approved=True, answer="second"))
        assert api.result(execution_id)["stdout"] == "True second None\n"
