"""What code in a sandbox may use of Atoll: its staging area, questions and messages."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.link.client import Link
from atoll.link.errors import ExecutorError
from atoll.settings import LinkSettings
from tests import drivers
from tests.e2e.api import V1, answer, eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.api import Api
    from tests.harness import Server

pytestmark = pytest.mark.quick

STAGED = "import os\nhere = os.environ['ATOLL_STAGING']\nopen(here + '/out', 'w').write('x')\n"
SHOW = "import atoll_session as a\nprint(a.execution_id, a.staging())"


def files(api: Api, session: str) -> list[str]:
    """All files that code of the session sees, without those of Atoll."""
    code = (
        "import os\n"
        "for place, names, files in os.walk('.'):\n"
        "    for name in files + names: print(os.path.join(place, name)[2:])"
    )
    listed = sorted(api.run(session, code)["stdout"].splitlines())
    return [name for name in listed if not name.startswith(".tmp")]


# Staging


def test_staged_files_become_files_of_the_workspace_and_artifacts(api: Api, session: str) -> None:
    api.put(session, "data/old", b"old")
    code = STAGED + "os.mkdir(here + '/data'); open(here + '/data/new', 'w').write('new')\n"

    result = api.run(session, code)

    assert result["artifacts"] == ["data/new", "out"]
    assert files(api, session) == ["data", "data/new", "data/old", "out"]
    assert api.names(session) == ["data", "out"]


def test_a_command_can_stage_files(api: Api, session: str) -> None:
    result = api.run(session, command=["sh", "-c", 'echo hi > "$ATOLL_STAGING/out"'])

    assert result["artifacts"] == ["out"]


@pytest.mark.parametrize(
    "end",
    ["raise SystemExit(1)", "os.kill(os.getpid(), 9)", "while True: pass", "1 / 0"],
    ids=["exit", "kill", "time-out", "exception"],
)
def test_staged_files_are_removed_when_the_execution_fails(
    api: Api, session: str, end: str
) -> None:
    result = api.run(session, STAGED + end, timeout=0.5)

    assert result["status"] in ("failed", "timeout")
    assert result["artifacts"] == []
    listing = api.run(session, "import os; print(os.listdir('.'), os.listdir('.tmp'))")
    assert listing["stdout"] == f"['.tmp'] ['{listing['execution_id']}']\n"


def test_staged_files_are_removed_when_the_execution_is_cancelled(api: Api, session: str) -> None:
    execution = api.submit(session, STAGED + "open('begun', 'w').close()\n" + until("never"))
    eventually(lambda: "begun" in api.names(session))
    answer(api.http.post(f"{V1}/executions/{execution}/cancel"))

    assert api.result(execution)["artifacts"] == []
    assert files(api, session) == ["begun"]


def test_the_staging_area_is_not_listed(api: Api, session: str) -> None:
    execution = api.submit(session, STAGED + "open('begun', 'w').close()\n" + until("go"))
    eventually(lambda: "begun" in api.names(session))

    assert api.names(session) == ["begun"]
    api.put(session, "go")
    assert api.result(execution)["status"] == "success"


def test_staged_files_that_conflict_with_the_workspace_fail_the_execution(
    api: Api, session: str
) -> None:
    api.put(session, "out/mine", b"mine")

    result = api.run(session, STAGED)

    assert (result["status"], result["exit_code"]) == ("failed", 0)
    assert result["error"]["code"] == "staging_conflict"
    assert result["artifacts"] == []
    assert files(api, session) == ["out", "out/mine"]


def test_staged_files_of_a_lost_instance_are_removed(api: Api, server: Server) -> None:
    session = api.create()["id"]
    once = "if os.path.exists('begun'): raise SystemExit(1)\nopen('begun', 'w').close()\n"
    execution = api.submit(session, STAGED + once + until("never"))
    eventually(lambda: "begun" in api.names(session))
    asyncio.run(call(server, api.get(session)["container_id"], "shutdown"))
    assert api.result(execution)["exit_code"] == 1

    listing = api.run(session, "import os; print(os.listdir('.tmp'))")
    assert listing["stdout"] == f"['{listing['execution_id']}']\n"
    api.end(session)


@pytest.mark.parametrize("place", ["/tmp", "/etc", "/workspace", "/proc/self"])
@pytest.mark.parametrize("what", [".tmp", "the area"])
def test_links_in_place_of_the_staging_area_are_not_followed(
    api: Api, session: str, place: str, what: str
) -> None:
    target = "'.tmp'" if what == ".tmp" else "here"
    code = (
        STAGED + "import shutil\nopen('/tmp/outside', 'w').write('x'); open('mine', 'w').close()\n"
        f"shutil.rmtree({target}); os.symlink({place!r}, {target})\n"
    )

    result = api.run(session, code)

    assert result["status"] == ("success" if what == ".tmp" else "failed"), result
    assert files(api, session) == ["mine"]
    assert api.run(session, "print(open('/tmp/outside').read())")["stdout"] == "x\n"
    # The session continues without a staging area, because code took its name.
    area = api.run(session, "import atoll_session; print(atoll_session.staging())")
    assert area["status"] == ("failed" if what == ".tmp" else "success")


def test_unusual_files_can_be_staged(api: Api, session: str) -> None:
    code = (
        STAGED + "os.mkfifo(here + '/pipe'); os.symlink('/etc/passwd', here + '/link')\n"
        "for name in ('null', '-rf', 'a\\nb', '…', 'x' * 255):\n"
        "    open(f'{here}/{name}', 'w').close()\n"
        "import socket; socket.socket(socket.AF_UNIX).bind(here + '/socket')\n"
    )

    result = api.run(session, code)

    assert result["status"] == "success", result
    assert result["artifacts"] == sorted(["out", "null", "-rf", "a\nb", "…", "x" * 255])
    assert set(api.names(session)) >= {"pipe", "link", "socket"}


def test_ten_thousand_files_and_a_deep_tree_are_staged(api: Api, session: str) -> None:
    code = (
        STAGED + "for n in range(10_000): open(f'{here}/{n}', 'w').close()\n"
        "os.chdir(here)\n"
        "for n in range(1500): os.mkdir('d'); os.chdir('d')\n"
    )

    result = api.run(session, code, wait=60)

    assert result["status"] == "success", result
    assert result["artifacts_truncated"]
    counted = api.run(session, "import os; print(len(os.listdir('.')))")
    assert counted["stdout"] == "10003\n"


# The module, however Python was started


@pytest.mark.parametrize(
    "request_",
    [
        {"code": SHOW},
        {"code": f"import runpy, sys\nopen('s.py', 'w').write({SHOW!r})\nrunpy.run_path('s.py')"},
        {"command": ["python3", "-c", SHOW]},
        {"code": f"import subprocess\nsubprocess.run(['python3', '-c', {SHOW!r}], check=True)"},
        {"code": SHOW, "env": {"PYTHONPATH": "/workspace/own"}},
        {"command": ["python3", "-c", SHOW], "env": {"PYTHONPATH": "/workspace/own"}},
    ],
    ids=["fork", "script", "command", "subprocess", "fork-own-path", "command-own-path"],
)
def test_the_session_module_can_be_imported(
    api: Api, session: str, request_: dict[str, Any]
) -> None:
    result = api.run(session, **request_)

    execution = result["execution_id"]
    assert result["stdout"] == f"{execution} /workspace/.tmp/{execution}\n", result["stderr"]


def test_the_pythonpath_of_the_user_comes_first(api: Api, session: str) -> None:
    api.put(session, "own/atoll_session.py", b"print('mine')")
    result = api.run(
        session, command=["python3", "-c", "import atoll_session"], env={"PYTHONPATH": "own"}
    )
    assert result["stdout"] == "mine\n"


def test_the_session_command_can_be_run(api: Api, session: str) -> None:
    result = api.run(
        session, command=["sh", "-c", "atoll-session staging && atoll-session messages"]
    )
    assert result["stdout"] == f"/workspace/.tmp/{result['execution_id']}\n"
    assert api.run(session, command=["atoll-session", "nonsense"])["exit_code"] == 2


def test_code_cannot_change_shared_files(api: Api, session: str) -> None:
    code = (
        "import atoll_session, os\n"
        "for path in (atoll_session.__file__, '/run/atoll/inside/bin/atoll-session'):\n"
        "    try: open(path, 'a')\n"
        "    except OSError as error: print(error.errno)\n"
    )
    assert api.run(session, code)["stdout"] in ("30\n30\n", "13\n13\n")


# Questions and messages, by a link of the test's own


async def call(server: Server, instance: str, op: str, **fields: Any) -> dict[str, Any]:
    directory, token = drivers.link(server.data_dir, instance)
    fd = os.open(directory, os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/link.sock"
        link = await Link.connect(path, LinkSettings(), timeout=timedelta(seconds=10), token=token)
    finally:
        os.close(fd)
    try:
        return await link.call(op, **fields)
    finally:
        link.close()


@pytest.fixture
def send(api: Api, server: Server, session: str) -> Callable[..., dict[str, Any]]:
    """A request to the session's executor, again until it finds what it is about."""

    def send(op: str, **fields: Any) -> dict[str, Any]:
        received: list[dict[str, Any]] = []

        def done() -> bool:
            try:
                instance = api.get(session)["container_id"]
                received.append(asyncio.run(call(server, instance, op, **fields)))
            except ExecutorError as error:
                if error.code not in ("unknown_run", "approval_gone"):
                    raise
            return bool(received)

        eventually(done)
        return received[0]

    return send


def test_a_person_answers_a_question(
    api: Api, session: str, send: Callable[..., dict[str, Any]]
) -> None:
    code = "import atoll_session\nx = atoll_session.ask('Go?')\nprint(x.approved, x.answer)"
    execution = api.submit(session, code)

    send("answer", id=execution, approval="1", answer={"approved": True, "answer": [1]})

    assert api.result(execution)["stdout"] == "True [1]\n"


@pytest.mark.parametrize(("approved", "code"), [(True, 0), (False, 1)])
def test_a_person_answers_a_question_of_the_shell(
    api: Api, session: str, send: Callable[..., dict[str, Any]], approved: bool, code: int
) -> None:
    script = "atoll-session ask 'Go?' --data '{\"n\": 1}' --timeout 20"
    for _ in range(5):
        script = f"sh -c {shlex.quote(script)}; exit $?"  # Deep below the execution's own process.
    execution = api.submit(session, command=["sh", "-c", script])

    send("answer", id=execution, approval="1", answer={"approved": approved, "answer": "as said"})

    result = api.result(execution)
    assert (result["exit_code"], result["stdout"]) == (code, "as said\n")


def test_messages_reach_the_code(
    api: Api, session: str, send: Callable[..., dict[str, Any]]
) -> None:
    execution = api.submit(
        session, command=["sh", "-c", "sh -c 'atoll-session messages --wait 20'"]
    )

    send("message", id=execution, text='é "1"\n2')

    assert api.result(execution)["stdout"] == json.dumps('é "1"\n2') + "\n"


# The same through the API


def test_the_api_injects_messages(api: Api, session: str) -> None:
    code = "import atoll_session\nprint('begun', flush=True)\nprint(atoll_session.messages(20))"
    execution = api.submit(session, code)
    api.await_status(execution, "running")

    inject = f"{V1}/executions/{execution}/inject"
    assert api.http.post(inject, json={"message": "hello"}).status_code == 200

    assert api.result(execution)["stdout"] == "begun\n['hello']\n"
    assert api.http.post(inject, json={"message": "late"}).status_code == 409


def test_the_api_answers_questions(api: Api, session: str) -> None:
    code = "import atoll_session\nx = atoll_session.ask('Go?', {'n': 1})\nprint(x.answer)"
    execution = api.submit(session, code)
    events = api.events(execution)
    asked = next(content for _, name, content in events if name == "approval")
    assert (asked["question"], asked["data"], asked["state"]) == ("Go?", {"n": 1}, "asked")

    resume = f"{V1}/executions/{execution}/resume"
    assert api.http.post(resume, json={"approved": True, "answer": "yes"}).status_code == 200

    assert api.result(execution)["stdout"] == "yes\n"
    assert api.http.post(resume, json={"approved": True}).status_code == 409
