"""Questions of an execution at the replica that owns it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import Conflict, NotFound
from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.service.background import BackgroundTasks
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.run import Run
from atoll.service.sessions.access import SessionAccess
from atoll.settings import CoordinationSettings, ExecutionSettings

pytestmark = pytest.mark.anyio


class Executor:
    """Replaces a sandbox and records the answers."""

    def __init__(self) -> None:
        self.link = self
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def reachable(self, session_id: str) -> Executor:
        return self

    async def call(self, op: str, **fields: Any) -> None:
        self.answers.put_nowait(fields)
        raise NotFound("over meanwhile")


class Environment:
    def __init__(self) -> None:
        clock = SystemClock()
        self.coordination = MemoryCoordination(
            "repl_1", CoordinationSettings(), timedelta(hours=1), clock
        )
        self.executor = Executor()
        lives: Any = self.executor
        replica: Any = SimpleNamespace(coordination=self.coordination, background=BackgroundTasks())
        self.approvals = Approvals(replica, SessionAccess(lives, lives, lives))
        execution = Execution(
            "exec_1", "sess_1", Request(code=""), ExecutionStatus.RUNNING, datetime.now(UTC)
        )
        self.running = Run(execution, ExecutionSettings())

    def ask(self, question: str, number: str = "1", data: Any = None) -> None:
        line = {"id": number, "state": "asked", "question": question, "timeout": 30.0}
        self.approvals.question_changed(self.running, {**line, "data": data})

    async def shown(self, question: str | None) -> None:
        async with asyncio.timeout(60):
            while True:
                found = await self.approvals.question("exec_1")
                if question == (None if found is None else found["question"]):
                    return
                await asyncio.sleep(0)


async def test_the_question_of_a_lost_attempt_is_not_answered_to_the_next() -> None:
    environment = Environment()
    environment.ask("may I?")
    environment.ask("and this?", "2")
    await environment.shown("may I?")
    environment.approvals.forget(environment.running)
    await environment.shown(None)
    with pytest.raises(Conflict):
        await environment.approvals.resume("exec_1", {"approved": True}, approval=None, status="")
    environment.ask("something else?")
    await environment.shown("something else?")
    environment.approvals.forget(environment.running)
    await environment.shown(None)
    assert environment.executor.answers.empty()


async def test_an_oversized_question_is_refused_at_once() -> None:
    environment = Environment()
    # Short in the encoding of the executor, and long in ours.
    environment.ask("?", data=[1e15] * 5000)
    response = await asyncio.wait_for(environment.executor.answers.get(), 60)
    answer = {"approved": False, "answer": None, "reason": "message_too_large"}
    assert response == {"id": "exec_1", "approval": "1", "answer": answer}


async def test_a_question_of_the_maximum_size_of_an_executor_is_accepted() -> None:
    environment = Environment()
    environment.ask("large", data=[1] * 32_000)
    await environment.shown("large")
    environment.approvals.forget(environment.running)
    await environment.shown(None)
