"""The SDK against a real server and an embedded one."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Answer, Approval, AsyncAtoll, Atoll, Conflict
from tests.e2e.api import until
from tests.harness import Server
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

COUNT = "for n in range(1000): print(n, flush=True)\n"
NUMBERS = "".join(f"{n}\n" for n in range(1000))


@pytest.fixture(params=["server", "embedded"])
def atoll(request: pytest.FixtureRequest, bubblewrap: str, tmp_path: Path) -> Iterator[Atoll]:
    if request.param == "embedded":
        with Atoll(data_dir=tmp_path, pool={"size": 0}) as atoll:
            yield atoll
    else:
        server: Server = request.getfixturevalue("server")
        with Atoll(server.url, api_key=server.key) as atoll:
            yield atoll


# Events


def test_a_stream_yields_events_live(atoll: Atoll) -> None:
    code = "print('first', flush=True)\n" + until("go") + "print('second')\n"
    kinds: list[str] = []
    output = ""
    with atoll.session() as session:
        for event in session.stream(code):
            kinds.append(event.kind)
            output += event.text
            if output == "first\n" and "result" not in kinds:
                session.files.write("go", "")
    assert output == "first\nsecond\n"
    assert (kinds[0], kinds[-1]) == ("started", "result")


def test_leaving_a_stream_cancels_the_execution(atoll: Atoll) -> None:
    with atoll.session() as session:
        for event in session.stream("print('on', flush=True)\n" + until("never")):
            if event.kind == "stdout":
                break
        info = session.execution(event.execution_id).info()
        assert (info.status, info.cause) == ("cancelled", "user")


def test_stored_events_equal_live_ones_from_any_position(atoll: Atoll) -> None:
    with atoll.session() as session:
        live = [event for event in session.stream(COUNT) if event.sequence]
        execution = session.execution(live[0].execution_id)
        again = list(execution.events())
        assert [event.sequence for event in again] == [event.sequence for event in live]
        middle = live[len(live) // 2]
        rest = list(execution.events(after=middle.sequence))
        assert [event.sequence for event in rest] == [
            event.sequence for event in live if event.sequence > middle.sequence
        ]
        assert list(execution.events(after=live[-1].sequence)) == []


async def test_a_stream_survives_a_killed_and_restarted_server(
    bubblewrap: str, tmp_path: Path
) -> None:
    code = (
        "for n in range(300): print(n, flush=True)\n"
        + until("go")
        + "for n in range(300, 1000): print(n, flush=True)\n"
    )
    with Server(tmp_path, "--port", str(free_port()), ATOLL_POOL__SIZE="0") as server:
        async with AsyncAtoll(server.url, api_key=server.key) as atoll:
            session = await atoll.sessions.create()
            output, sequences = "", []
            killed = False
            async for event in session.stream(code, timeout=120):
                output += event.text if event.kind == "stdout" else ""
                sequences += [event.sequence] if event.sequence else []
                if not killed and output.endswith("299\n"):
                    killed = True
                    await asyncio.to_thread(server.stop, signal.SIGKILL)
                    await asyncio.to_thread(server.start)
                    await session.files.write("go", "")
            assert killed
            assert event.result is not None
            assert event.result.ok
            assert output == NUMBERS == event.result.stdout
            assert sequences == sorted(set(sequences))
            await session.delete()


async def test_calls_wait_for_an_unavailable_server(bubblewrap: str, tmp_path: Path) -> None:
    """Each is made while the server is down, and succeeds when it is back."""
    server = Server(tmp_path, "--port", str(free_port()), ATOLL_POOL__SIZE="0")
    with server:
        async with AsyncAtoll(server.url, api_key=server.key) as atoll:
            session, doomed = await atoll.session(), await atoll.session()
            server.stop(signal.SIGKILL)
            async with asyncio.TaskGroup() as calls:
                run = calls.create_task(session.run("print(6 * 7)"))
                invoked = calls.create_task(session.invoke(code="print(7)"))
                written = calls.create_task(session.files.write("a.txt", "text"))
                created = calls.create_task(atoll.sessions.create())
                deleted = calls.create_task(doomed.delete())
                calls.create_task(asyncio.to_thread(server.start))
            assert run.result().stdout == "42\n"
            assert (await invoked.result().result()).stdout == "7\n"
            assert written.result().size == 4
            assert deleted.result().status == "terminated"
            assert (await created.result().run("print(1)")).ok
            await created.result().delete()
            await session.delete()


async def test_a_run_during_which_the_server_dies_is_run_once(
    bubblewrap: str, tmp_path: Path
) -> None:
    server = Server(tmp_path, "--port", str(free_port()), ATOLL_POOL__SIZE="0")
    code = "open('runs', 'a').write('x')\n" + until("go") + "print(open('runs').read())"
    with server:
        async with (
            AsyncAtoll(server.url, api_key=server.key) as atoll,
            atoll.session() as session,
        ):
            async for change in session.files.watch():
                if change.kind == "watching":
                    running = asyncio.create_task(session.run(code))
                if change.path == "runs":
                    break
            server.stop(signal.SIGKILL)
            await asyncio.to_thread(server.start)
            await session.files.write("go", "")
            assert (await running).stdout == "x\n"


@pytest.mark.parametrize("first", ["run", "submit", "stream", "callback"])
def test_a_key_names_one_run_however_it_is_awaited(atoll: Atoll, first: str) -> None:
    code = "open('runs', 'a').write('x'); print(open('runs').read())"
    with atoll.session() as session:
        key = f"key-{session.id}"
        match first:
            case "run":
                session.run(code, idempotency_key=key)
            case "submit":
                session.submit(code, idempotency_key=key).wait()
            case "stream":
                list(session.stream(code, idempotency_key=key))
            case _:
                session.run(code, on_stdout=lambda text: None, idempotency_key=key)
        assert session.run(code, idempotency_key=key).stdout == "x\n"
        assert session.submit(code, idempotency_key=key).wait().stdout == "x\n"
        assert session.run(code, on_event=lambda event: None, idempotency_key=key).stdout == "x\n"


@pytest.mark.parametrize("other", [{"code": "2"}, {"code": "1", "stdin": "in"}, {"event": 5}])
def test_an_execution_id_names_one_execution(atoll: Atoll, other: dict[str, Any]) -> None:
    with atoll.session() as session:
        mine = f"mine-{session.id}"
        session.run("1", execution_id=mine)
        assert session.run("1", timeout=7, execution_id=mine).ok
        with pytest.raises(Conflict) as raised:
            session.run(**{"code": "1", **other}, execution_id=mine)
        assert raised.value.code == "execution_id_in_use"


def test_a_queued_execution_reports_its_position(atoll: Atoll) -> None:
    with atoll.session() as session:
        first = session.submit(until("go"))
        waiting = session.submit("print(1)").events()
        queued = next(event for event in waiting if event.kind == "queued")
        assert queued.ahead == 1
        session.files.write("go", "")
        assert [event.kind for event in waiting][-1] == "result"
        assert first.wait().ok


def test_a_session_runs_as_many_executions_as_its_capacity(atoll: Atoll) -> None:
    with atoll.session(capacity=2) as session:
        assert session.info.capacity == 2
        held = session.submit(until("go"))
        assert session.run("open('go', 'w')").ok
        assert held.wait().ok


# Time


@pytest.mark.slow
def test_wait_and_timeout_are_independent(atoll: Atoll) -> None:
    with atoll.session() as session:
        assert session.run(until("never"), timeout=0.5).status == "timeout"
        with pytest.raises(TimeoutError, match="was cancelled"):
            session.run(until("never"), wait=0.5)
        execution = session.submit(until("go"))
        with pytest.raises(TimeoutError, match="still running"):
            execution.wait(0.1)
        # The line is not the code's time.
        behind = session.submit("print(1)", timeout=4)
        with pytest.raises(TimeoutError):
            behind.wait(5)
        session.files.write("go", "")
        assert behind.wait().ok


@pytest.mark.slow
def test_a_run_can_last_longer_than_one_request(bubblewrap: str, tmp_path: Path) -> None:
    limits = {"max_wait": 0.2}
    with (
        Atoll(data_dir=tmp_path, pool={"size": 0}, execution=limits, timeout=30) as atoll,
        atoll.session() as session,
    ):
        code = "import time; time.sleep(1.5); print(1)"
        assert session.run(code).stdout == "1\n"
        assert session.invoke(code=code).result().stdout == "1\n"


# While it runs


def test_stdin_is_written_to_running_code(atoll: Atoll) -> None:
    with atoll.session() as session:
        execution = session.submit(
            "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)",
            stdin="one\n",
            stdin_open=True,
        )
        output = ""
        for event in execution.events():
            output += event.text
            if output == "ONE\n" and event.kind == "stdout":
                execution.write("two\n")
                execution.write(b"three\n", eof=True)
        assert output == "ONE\nTWO\nTHREE\n"
        with pytest.raises(Conflict) as raised:
            execution.write("late")
        assert raised.value.code == "execution_not_running"
        assert execution.cancel().status == "completed"


def test_an_execution_id_runs_once(atoll: Atoll) -> None:
    with atoll.session() as session:
        code = "open('ran', 'a').write('x')"
        first = session.run(code, execution_id=f"mine-{session.id}")
        again = session.run(code, execution_id=f"mine-{session.id}")
        assert first == again
        assert session.files.read("ran") == b"x"


ASK = """
from atoll_session import ask
answer = ask("Delete them?", {"files": 3})
def handler(event):
    return [bool(answer), answer.answer, answer.reason]
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Answer(True, {"only": 2}), [True, {"only": 2}, None]),
        (Answer(False, reason="too many"), [False, None, "too many"]),
        (True, [True, None, None]),
    ],
    ids=["value", "refusal", "yes"],
)
def test_a_callback_answers_a_question_of_the_code(
    atoll: Atoll, given: Answer | bool, told: list[object]
) -> None:
    asked: list[Approval] = []

    def answer(approval: Approval) -> Answer | bool:
        asked.append(approval)
        return given

    with atoll.session() as session:
        result = session.run(ASK, on_approval=answer).check()
    assert result.return_value == told
    assert [(one.question, one.data) for one in asked] == [("Delete them?", {"files": 3})]


async def test_an_answer_survives_a_restart_of_the_server(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, "--port", str(free_port()), ATOLL_POOL__SIZE="0") as server:

        async def answer(approval: Approval) -> bool:
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            return True

        async with AsyncAtoll(server.url, api_key=server.key) as atoll:
            session = await atoll.sessions.create()
            result = await session.run(ASK, on_approval=answer, timeout=120)
            assert result.check().return_value == [True, None, None]
            await session.delete()


def test_messages_reach_the_code(atoll: Atoll) -> None:
    code = (
        "from atoll_session import messages\nprint('ready', flush=True)\nprint(messages(wait=30))"
    )
    with atoll.session() as session:
        output = ""
        for event in session.stream(code):
            output += event.text
            if output == "ready\n" and event.kind == "stdout":
                session.execution(event.execution_id).send("hello")
        assert output == "ready\n['hello']\n"


# Invocations


def test_a_function_of_the_workspace_is_invoked(atoll: Atoll) -> None:
    with atoll.session() as session:
        session.files.write("jobs.py", "def add(event):\n    return event['a'] + event['b']\n")
        invocation = session.invoke("jobs:add", input={"a": 2, "b": 3}, metadata={"for": "test"})
        assert invocation.status == "succeeded"
        assert invocation.result().return_value == 5
        assert invocation.info.metadata == {"for": "test"}
        assert [one.function_name for one in invocation.executions()] == ["jobs:add"]
        found = atoll.invocations.get(invocation.id)
        assert found.info.result == invocation.result()
        listed = [one.id for one in atoll.invocations.list(session_id=session.id)]
        assert listed == [invocation.id]
        assert invocation.cancel().status == "succeeded"


def test_bytes_are_passed_to_a_function_of_the_code(atoll: Atoll) -> None:
    with atoll.session() as session:
        invocation = session.invoke(
            "size", code="def size(body): return len(body)", input=b"\xff\0"
        )
        assert invocation.result().check().return_value == 2


def test_a_new_execution_id_retries_a_failed_invocation(atoll: Atoll) -> None:
    code = "import os; assert os.path.exists('mended')"
    with atoll.session() as session:
        mine = f"job-{session.id}"
        failed = session.invoke(code=code, invocation_id=mine)
        assert failed.status == "failed"
        same = session.invoke(code=code, invocation_id=mine)
        assert same.info.execution_id == failed.info.execution_id
        session.files.write("mended", "")
        again = session.invoke(code=code, invocation_id=mine, execution_id=f"{mine}-2")
        assert (again.id, again.status) == (mine, "succeeded")
        assert [one.status for one in again.executions()] == ["completed", "failed"]


def test_an_invocation_is_cancelled_with_its_execution(atoll: Atoll) -> None:
    with atoll.session() as session:
        invocation = session.invoke(code=until("never"), mode="async")
        assert invocation.cancel("enough").status == "cancelled"
        assert invocation.wait().cause == "user"
