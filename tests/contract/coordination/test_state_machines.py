"""Any sequence of calls on two replicas, compared with simple models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from atoll.coordination.base import CANCELLED, Coordination, LeaseHolder
from tests.servers.redis import RedisServer

from .backend import LONG, Backend, memory_backend, redis_backend, until

T = TypeVar("T")

Opener = Callable[[], AbstractAsyncContextManager[Backend]]

REPLICAS = ("a", "b")
OWNERS = [LeaseHolder(replica, owner) for replica in REPLICAS for owner in ("x", "y", "z")]


class Machine(RuleBasedStateMachine):
    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.backend = self.run(self.stack.enter_async_context(opener()))
        self.tasks: list[asyncio.Task[Any]] = []

    def teardown(self) -> None:
        self.run(self.end())
        self.runner.close()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.stack.aclose()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(LONG):
                return await work

        return self.runner.run(bounded())

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        async def start() -> asyncio.Task[T]:
            return asyncio.create_task(work)

        task = self.run(start())
        self.tasks.append(task)
        return task

    async def result(self, task: asyncio.Task[T]) -> T:
        return await task

    def replica(self, name: str) -> Coordination:
        return {"a": self.backend.a, "b": self.backend.b}[name]


class LeaseMachine(Machine):
    def __init__(self, opener: Opener) -> None:
        super().__init__(opener)
        self.holder: LeaseHolder | None = None
        self.line: list[tuple[LeaseHolder, asyncio.Task[LeaseHolder | None]]] = []
        self.lost: set[str] = set()

    def waits(self, me: LeaseHolder) -> bool:
        return any(me == waiter for waiter, _ in self.line)

    def ask_for(self, me: LeaseHolder) -> LeaseHolder | None:
        """The holder before a request of `me`, in the model."""
        holder = self.holder
        if holder is not None and holder.replica in self.lost - {me.replica}:
            holder = None
        if holder is None or holder == me:
            self.holder = me
            return None
        return holder

    def free(self) -> None:
        """It goes to the first in line."""
        self.holder = None
        if self.line:
            self.holder, task = self.line.pop(0)
            assert self.run(self.result(task)) is None

    @rule(me=st.sampled_from(OWNERS))
    def acquire(self, me: LeaseHolder) -> None:
        if not self.waits(me):
            holder = self.run(self.replica(me.replica).acquire("s", me.owner))
            assert holder == self.ask_for(me)

    @rule(me=st.sampled_from(OWNERS))
    def wait(self, me: LeaseHolder) -> None:
        if me.replica in self.lost or self.waits(me):
            return
        task = self.start(self.replica(me.replica).acquire("s", me.owner, wait=LONG))
        if self.ask_for(me) is None:
            assert self.run(self.result(task)) is None
        else:
            self.line.append((me, task))
            self.run(self.backend.until_in_line("s", len(self.line)))

    @precondition(lambda self: self.line)
    @rule(place=st.integers(0, 5))
    def give_up(self, place: int) -> None:
        _, task = self.line.pop(place % len(self.line))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            self.run(self.result(task))

    @rule(me=st.sampled_from(OWNERS))
    def release(self, me: LeaseHolder) -> None:
        self.run(self.replica(me.replica).release("s", me.owner))
        if self.holder == me:
            self.free()

    @rule(me=st.sampled_from(OWNERS))
    def renew(self, me: LeaseHolder) -> None:
        assert self.run(self.replica(me.replica).renew("s", me.owner)) == (self.holder == me)

    def nudge(self, replica: str) -> None:
        """A request may find a lost holder that was not noticed yet; but waiters come first."""
        if self.line:
            holder = self.run(self.replica(replica).acquire("s", "nudge"))
            assert holder == self.line[0][0]
            self.free()

    @rule(replica=st.sampled_from(REPLICAS))
    def expire(self, replica: str) -> None:
        self.run(self.backend.leases_expire())
        self.holder = None
        self.nudge(replica)

    @rule(replica=st.sampled_from(REPLICAS))
    def lose(self, replica: str) -> None:
        if any(waiter.replica == replica for waiter, _ in self.line):
            return
        self.run(self.backend.lose(self.replica(replica)))
        self.lost.add(replica)
        if self.holder is not None and self.holder.replica == replica:
            self.nudge(next(iter(set(REPLICAS) - {replica})))

    @rule(replica=st.sampled_from(REPLICAS))
    def heartbeat(self, replica: str) -> None:
        assert self.run(self.replica(replica).heartbeat()) == (replica not in self.lost)
        self.lost.discard(replica)

    @invariant()
    def all_agree(self) -> None:
        assert self.run(self.backend.holder("s")) == self.holder
        for replica in REPLICAS:
            assert self.run(self.backend.a.alive(replica)) == (replica not in self.lost)
        assert self.run(self.backend.in_line("s")) == len(self.line)


class ExecutionMachine(Machine):
    def __init__(self, opener: Opener) -> None:
        super().__init__(opener)
        self.execution = "e0"
        self.asked: asyncio.Task[dict[str, Any] | None] | None = None
        self.question: dict[str, Any] | None = None
        self.answered = False
        self.reason: str | None = None
        self.number = 0

    def told(self, answer: dict[str, Any] | None) -> None:
        if self.asked is not None:
            assert self.run(self.result(self.asked)) == answer
            self.answered = answer is not None
        self.asked = self.question = None

    def put(self, replica: str) -> None:
        self.number += 1
        question = {"number": self.number}
        task = self.start(self.replica(replica).ask(self.execution, question, timeout=10 * LONG))
        if self.reason is None:
            self.told(None)
            self.question = question
            self.answered = False
        else:
            self.answered = True
        self.asked = task

    @rule(replica=st.sampled_from(REPLICAS))
    def ask(self, replica: str) -> None:
        former = self.asked
        self.put(replica)
        if self.reason is not None:
            self.told(CANCELLED)
            return

        async def put() -> bool:
            return await self.backend.a.question(self.execution) == self.question

        self.run(until(put))
        assert former is None or former.done()

    @precondition(lambda self: self.reason is None and self.asked is None)
    @rule(replica=st.sampled_from(REPLICAS), other=st.sampled_from(REPLICAS))
    def ask_and_resolve_at_once(self, replica: str, other: str) -> None:
        self.put(replica)
        answer = {"at once": self.number}

        async def resolved() -> bool:
            return await self.replica(other).resolve(self.execution, answer) == "resolved"

        self.run(until(resolved))
        self.told(answer)

    @rule(replica=st.sampled_from(REPLICAS))
    def resolve(self, replica: str) -> None:
        self.number += 1
        answer = {"answer": self.number}
        resolution = self.run(self.replica(replica).resolve(self.execution, answer))
        if self.asked is not None:
            assert resolution == "resolved"
            self.told(answer)
        else:
            assert resolution == ("already" if self.answered else "gone")

    @precondition(lambda self: self.asked is not None)
    @rule()
    def give_up(self) -> None:
        assert self.asked is not None
        self.asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            self.run(self.result(self.asked))
        self.asked = self.question = None

    @rule(replica=st.sampled_from(REPLICAS), reason=st.sampled_from(["user", "timeout"]))
    def cancel(self, replica: str, reason: str) -> None:
        self.run(self.replica(replica).cancel(self.execution, reason))
        self.reason = self.reason or reason
        self.told(CANCELLED)

    @rule()
    def begin_another(self) -> None:
        if self.asked is not None:
            self.give_up()
        self.number += 1
        self.execution = f"e{self.number}"
        self.reason = None
        self.answered = False

    @invariant()
    def all_agree(self) -> None:
        for name in REPLICAS:
            replica = self.replica(name)
            assert self.run(replica.question(self.execution)) == self.question
            assert self.run(replica.cancelled(self.execution)) == self.reason


def check(machine: type[Machine], opener: Opener, examples: int) -> None:
    run_state_machine_as_test(
        lambda: machine(opener),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


MACHINES = pytest.mark.parametrize("machine", [LeaseMachine, ExecutionMachine])


@pytest.mark.quick
@MACHINES
def test_memory_matches_the_model(machine: type[Machine]) -> None:
    check(machine, memory_backend, 100)


@MACHINES
def test_redis_matches_the_model(machine: type[Machine], redis_server: RedisServer) -> None:
    check(machine, lambda: redis_backend(redis_server.url), 30)
