from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest

from atoll import Conflict, InvalidRequest, NotFound

if TYPE_CHECKING:
    from atoll import AsyncAtoll, Atoll
    from tests.component.sdk.fake_server import FakeServer

HOLD = json.dumps({"hold": True})


def test_a_function_is_invoked_with_its_input(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        invocation = session.invoke(
            "jobs.report:main",
            input={"day": 3},
            timeout=0.0004,
            metadata={"who": "me"},
            invocation_id="inv-mine",
        )
    assert fake_server.bodies[-1] == {
        "session_id": session.id,
        "mode": "async",
        "function_name": "jobs.report:main",
        "input": {"day": 3},
        "timeout_ms": 1,
        "metadata": {"who": "me"},
        "invocation_id": "inv-mine",
    }
    assert (invocation.id, invocation.status) == ("inv-mine", "succeeded")
    assert invocation.result().ok
    assert invocation.wait() == invocation.info.result


def test_bytes_are_sent_with_their_type(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        session.invoke("f", code="def f(x): ...", input=b"\xff\x00", content_type="image/png")
        session.invoke(command=["cat"], args=["-"], input="text", cwd="sub", env={"A": "b"})
    assert fake_server.bodies[-2] == {
        "session_id": session.id,
        "mode": "async",
        "function_name": "f",
        "code": "def f(x): ...",
        "language": "python",
        "input_base64": "/wA=",
        "content_type": "image/png",
        "execution_id": ANY,
    }
    assert fake_server.bodies[-1] == {
        "session_id": session.id,
        "mode": "async",
        "command": ["cat"],
        "args": ["-"],
        "input": "text",
        "cwd": "sub",
        "env": {"A": "b"},
        "execution_id": ANY,
    }


def test_an_asynchronous_invocation_is_found_by_its_id(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    with atoll.session() as session:
        made = session.invoke(code=HOLD, mode="async")
        assert made.status == "running"
        with pytest.raises(Conflict) as early:
            made.result()
        assert early.value.code == "execution_not_finished"
        with pytest.raises(TimeoutError):
            made.wait(0)
        found = atoll.invocations.get(made.id)
        assert found.info.execution_id == made.execution.id
        fake_server.release()
        assert found.wait().ok
        assert found.status == "succeeded"
        assert made.refresh().ended
        assert [one.id for one in made.executions()] == [made.execution.id]
        with pytest.raises(NotFound):
            atoll.invocations.get("none")


def test_invocations_and_executions_are_listed(atoll: Atoll) -> None:
    with atoll.session() as session:
        for _ in range(3):
            session.invoke(code="x")
        held = session.invoke(code=HOLD, mode="async")
        assert len(list(atoll.invocations.list(session_id=session.id))) == 4
        assert [one.id for one in atoll.invocations.list(status="running")] == [held.id]
        (running,) = atoll.executions.list(status="running")
        assert running.invocation_id == held.id
        assert [attempt.cause for attempt in running.attempts] == ["node_lost"]
        assert len(list(session.executions(status="completed"))) == 3


def test_an_invocation_is_cancelled_with_a_reason(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        invocation = session.invoke(code=HOLD, mode="async")
        assert invocation.cancel("enough").status == "cancelled"
        assert fake_server.invocations[invocation.id].reason == "enough"
        ended = session.invoke(code="x")
        assert ended.cancel().status == "succeeded"


@pytest.mark.anyio
async def test_an_invocation_whose_caller_leaves_is_cancelled(
    async_atoll: AsyncAtoll, fake_server: FakeServer
) -> None:
    async with async_atoll.session() as session:
        calling = asyncio.create_task(session.invoke(code=HOLD))
        await asyncio.to_thread(fake_server.started.acquire)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        with pytest.raises(TimeoutError):
            await session.invoke(code=HOLD, wait=0.05)
        assert [one.cancelled for one in fake_server.invocations.values()] == [True, True]


def test_an_invocation_with_an_id_is_repeated(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.lost_answers = 2
    session.invoke(code="x", invocation_id="mine", execution_id="first")
    assert list(fake_server.executions) == ["first"]


def test_wrong_arguments_are_refused_before_anything_is_sent(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.sessions.create()
    with pytest.raises(InvalidRequest):
        session.invoke(command="ls -l")
    with pytest.raises(InvalidRequest):
        session.invoke("a:b", timeout=0)
    assert len(fake_server.bodies) == 1
