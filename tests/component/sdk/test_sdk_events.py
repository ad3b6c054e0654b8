"""Events, approvals, messages and cancellation of running executions."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from atoll import Answer, Approval, Conflict, TemporaryError
from atoll.sdk.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from atoll import AsyncAtoll, Atoll, Event
    from tests.component.sdk.fake_server import FakeServer

pytestmark = pytest.mark.anyio

HOLD = json.dumps({"out": [["stdout", "hi"]], "hold": True})


def asking(*questions: str) -> str:
    return json.dumps({"ask": questions})


# Events


def test_a_stream_yields_all_known_kinds_of_events(atoll: Atoll) -> None:
    shown = {"type": "display", "data": {"text/plain": "x"}, "metadata": {}}
    lost = {"attempt": 2, "cause": "node_lost", "message": "gone", "delay": 1.0}
    script = {
        "events": [
            ["queued", {"ahead": 3}],
            ["from_a_newer_server", {}],
            ["retry", lost],
            ["heartbeat", {}],
            ["display", shown],
        ],
        "out": [["stderr", "e"]],
    }
    with atoll.session() as session:
        events = list(session.stream(json.dumps(script)))
    kinds = ["queued", "retry", "heartbeat", "display", "started", "stderr", "result"]
    assert [event.kind for event in events] == kinds
    queued, retry, _, display, started, stderr, result = events
    assert queued.ahead == 3
    assert retry.retry is not None
    assert (retry.retry.attempt, retry.retry.cause, retry.retry.delay) == (2, "node_lost", 1.0)
    assert display.display is not None
    assert display.display.data == {"text/plain": "x"}
    assert started.attempt == 1
    assert stderr.text == "e"
    assert result.result is not None
    assert {event.execution_id for event in events} == {result.result.execution_id}


def test_a_stream_resumes_after_a_lost_connection(atoll: Atoll, fake_server: FakeServer) -> None:
    fake_server.cut_events_after = 2
    with atoll.session() as session:
        script = {"out": [["stdout", "a"], ["stdout", "b"], ["stdout", "c"]]}
        events = list(session.stream(json.dumps(script)))
    assert "".join(event.text for event in events) == "abc"
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5]


def test_events_start_after_the_given_number(atoll: Atoll) -> None:
    with atoll.session() as session:
        execution = session.submit(json.dumps({"out": [["stdout", "a"], ["stdout", "b"]]}))
        execution.wait()
        assert [event.text for event in execution.events(after=2)] == ["b", ""]


def test_no_events_follow_the_result(atoll: Atoll) -> None:
    with atoll.session() as session:
        execution = session.submit("x")
        last = list(execution.events())[-1].sequence
        assert list(execution.events(after=last)) == []


async def test_leaving_a_stream_cancels_its_execution(
    async_atoll: AsyncAtoll, fake_server: FakeServer
) -> None:
    async with async_atoll.session() as session:
        async with aclosing(cast("AsyncGenerator[Event]", session.stream(HOLD))) as events:
            async for event in events:
                if event.kind == "stdout":
                    break
        (execution,) = fake_server.executions.values()
        assert execution.cancelled
        assert execution.reason == "The caller stopped waiting."


def test_a_break_leaves_a_stream_in_synchronous_code(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        for event in session.stream(HOLD):
            if event.kind == "stdout":
                break
        (execution,) = fake_server.executions.values()
        assert execution.cancelled


def test_leaving_events_does_not_affect_the_execution(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    with atoll.session() as session:
        execution = session.submit(HOLD)
        with closing(cast("Generator[Event]", execution.events())) as events:
            assert next(events).kind == "started"
        assert execution.status().status == "running"


async def test_a_stream_whose_reader_is_cancelled_cancels_its_execution(
    async_atoll: AsyncAtoll, fake_server: FakeServer
) -> None:
    async def read() -> None:
        async for _ in session.stream(HOLD):
            pass

    async with async_atoll.session() as session:
        reading = asyncio.create_task(read())
        await asyncio.to_thread(fake_server.started.acquire)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        (execution,) = fake_server.executions.values()
        assert execution.cancelled


def test_a_callback_receives_every_event(atoll: Atoll) -> None:
    kinds: list[str] = []
    with atoll.session() as session:
        result = session.run("x", on_event=lambda event: kinds.append(event.kind))
    assert result.ok
    assert kinds == ["started", "stdout", "result"]


def test_synchronous_code_can_pass_a_coroutine_function(atoll: Atoll) -> None:
    pieces: list[str] = []

    async def keep(text: str) -> None:
        pieces.append(text)

    with atoll.session() as session:
        session.run("x", on_stdout=keep)
    assert pieces == ["x"]


def test_a_callback_that_fails_cancels_the_execution(atoll: Atoll, fake_server: FakeServer) -> None:
    def fail(text: str) -> None:
        raise ZeroDivisionError

    with atoll.session() as session, pytest.raises(ZeroDivisionError):
        session.run(HOLD, on_stdout=fail)
    (execution,) = fake_server.executions.values()
    assert execution.cancelled


# Ends


def test_a_run_ends_after_the_requested_wait(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        with pytest.raises(TimeoutError, match=r"within 0.05 s and was cancelled"):
            session.run(HOLD, wait=0.05)
        (execution,) = fake_server.executions.values()
        assert execution.cancelled
        assert "timeout" not in execution.request


def test_a_cancellation_has_a_reason(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        execution = session.submit(HOLD)
        assert execution.cancel("enough").status == "cancelled"
        assert fake_server.executions[execution.id].reason == "enough"
        assert execution.cancel().status == "cancelled"


def test_cancelling_an_ended_execution_is_not_an_error(atoll: Atoll) -> None:
    with atoll.session() as session:
        execution = session.submit("x")
        execution.wait()
        assert execution.cancel().status == "completed"


# Questions


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (True, {"approved": True}),
        (False, {"approved": False}),
        (Answer(True, {"limit": 3}), {"approved": True, "answer": {"limit": 3}}),
        (Answer(False, reason="no"), {"approved": False, "reason": "no"}),
    ],
    ids=["yes", "no", "value", "reason"],
)
def test_the_return_value_of_a_callback_answers_the_question(
    atoll: Atoll, returned: Any, told: dict[str, Any]
) -> None:
    asked: list[Approval] = []

    def answer(approval: Approval) -> Any:
        asked.append(approval)
        return returned

    with atoll.session() as session:
        result = session.run(asking("Delete?"), on_approval=answer)
    assert result.return_value == [told]
    assert [(one.question, one.data, one.timeout) for one in asked] == [("Delete?", [1], 300)]


@pytest.mark.parametrize("returned", ["no", "", 1, 0, {"approved": False}, ["yes"]])
def test_a_truthy_value_is_not_an_approval(
    atoll: Atoll, fake_server: FakeServer, returned: object
) -> None:
    wrong = pytest.raises(TypeError, match=f"on_approval .* not {type(returned).__name__}")
    with atoll.session() as session, wrong:
        session.run(asking("a"), on_approval=lambda _: returned, execution_id="mine")
    execution = fake_server.executions["mine"]
    assert (execution.answers, execution.cancelled) == ([], True)


def test_an_early_answer_is_repeated(
    atoll: Atoll, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.sdk.executions._ANSWER_DELAY", 60.0)
    fake_server.unheard = 2
    with atoll.session() as session:
        result = session.run(asking("a", "b"), on_approval=lambda approval: approval.id == "1")
    assert result.return_value == [{"approved": True}, {"approved": False}]


async def test_a_callback_can_leave_a_question_to_other_clients(async_atoll: AsyncAtoll) -> None:
    seen = asyncio.Event()

    async def see(approval: Approval) -> None:
        seen.set()

    async with async_atoll.session() as session:
        running = asyncio.create_task(
            session.run(asking("a"), on_approval=see, execution_id="mine")
        )
        await seen.wait()
        execution = async_atoll.execution("mine")
        question = await execution.approval()
        assert question is not None
        assert question.question == "a"
        with pytest.raises(Conflict) as raised:
            await execution.approve(approval_id="7")
        assert raised.value.code == "no_approval"
        await execution.approve({"n": 1}, approval_id=question.id)
        assert (await running).return_value == [{"approved": True, "answer": {"n": 1}}]
        with pytest.raises(Conflict):
            await execution.refuse("late")


# Input and messages


def test_a_message_and_input_are_sent(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        execution = session.submit(HOLD, stdin_open=True)
        assert execution.send("hello").status == "running"
        execution.write("é")
        execution.write(b"\xff", eof=True)
        execution.write("")
        execution.write("", eof=True)
        injected = fake_server.executions[execution.id].injected
        assert injected[0] == {"message": "hello"}
        given = [(base64.b64decode(one["stdin_base64"]), one["eof"]) for one in injected[1:]]
        assert given == [("é".encode(), False), (b"\xff", True), (b"", True)]
        assert fake_server.bodies[-1]["stdin_open"] is True
        execution.cancel()
        with pytest.raises(Conflict) as raised:
            execution.send("late")
        assert raised.value.code == "execution_not_running"


def test_large_input_is_chunked_and_waits_for_its_reader(
    atoll: Atoll, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 4096
    with atoll.session() as session:
        execution = session.submit(HOLD, stdin_open=True)
        fake_server.unread = 2
        execution.write(data, eof=True)
        injected = fake_server.executions[execution.id].injected
        assert b"".join(base64.b64decode(one["stdin_base64"]) for one in injected) == data
        assert [one["eof"] for one in injected] == [False] * (len(injected) - 1) + [True]
        assert len(injected) == 4
        monkeypatch.setattr(Backoff, "limit", 0.0)
        fake_server.unread = 10
        with pytest.raises(TemporaryError) as raised:
            execution.write(data)
        assert raised.value.code == "queue_full"


def test_a_chosen_id_makes_a_request_repeatable(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create(capacity=4)
    assert session.info.capacity == 4
    fake_server.keys.clear()
    fake_server.lost_answers = 2
    assert session.run("1", execution_id="mine").execution_id == "mine"
    assert session.submit("1", execution_id="mine").id == "mine"
    assert list(fake_server.executions) == ["mine"]
    assert fake_server.keys == [None] * 4
