"""Attempts that are lost with their instance, while the record of the execution changes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.clock import SystemClock
from atoll.errors import DatabaseUnavailable, SessionNotRunning
from atoll.link.errors import LinkLost
from atoll.model.execution import Execution, ExecutionStatus, Language, Request
from atoll.model.instance import Observation, State
from atoll.model.session import Durability
from tests.component.service.test_session_records import create
from tests.contract.stores.store_entities import make_execution
from tests.parts import ME, Parts, parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link
    from atoll.model.event import Event
    from atoll.model.instance import Handle
    from atoll.service.sessions.connections import Connection

pytestmark = pytest.mark.anyio

SECONDS = 30


@asynccontextmanager
async def adoptable(place: Path) -> AsyncIterator[tuple[Parts, Execution]]:
    """A running session, and an execution of it that began in an instance which is gone."""
    clock = SystemClock()
    async with parts(place, clock) as found:
        await found.driver.open()
        await found.templates.ensure_default()
        session = await create(found.sessions, ids.session_id())
        execution = make_execution(
            id=ids.execution_id(clock.now()),
            session_id=session.id,
            status=ExecutionStatus.RUNNING,
            created_at=clock.now(),
            started_at=clock.now(),
            instance_id="inst_gone",
            holder=ME,
        )
        await found.store.executions.add(execution)
        try:
            yield found, execution
        finally:
            await found.sessions.delete(session.id)
            await found.background.settle(SECONDS)
            await found.driver.close()


async def ended_record(found: Parts, execution: Execution) -> Execution:
    """The record, when the execution that is adopted now has ended."""
    running = await found.runner.start_from_record(execution, 1)
    await running.wait(SECONDS)
    assert running.finished
    stored = await found.store.executions.get(execution.id)
    assert stored is not None
    return stored


async def test_an_execution_recorded_as_running_while_its_session_connects_is_retried(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with adoptable(tmp_path) as (found, execution):
        connect, save = found.driver.connect, found.store.executions.save
        recorded = asyncio.Event()

        async def connect_late(handle: Handle) -> Link:
            await recorded.wait()
            return await connect(handle)

        async def saved(changed: Execution, *, event: Event | None = None) -> Execution:
            stored = await save(changed, event=event)
            recorded.set()
            return stored

        monkeypatch.setattr(found.driver, "connect", connect_late)
        monkeypatch.setattr(found.store.executions, "save", saved)
        found.connections.disconnect(execution.session_id)
        stored = await ended_record(found, execution)
        assert stored.status is ExecutionStatus.COMPLETED
        assert stored.retry_count == 1


async def test_a_retry_continues_after_an_unconfirmed_write_of_its_record(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with adoptable(tmp_path) as (found, execution):
        save = found.store.executions.save

        async def cut_off(changed: Execution, *, event: Event | None = None) -> Execution:
            stored = await save(changed, event=event)
            if changed.retry_count and changed.status is ExecutionStatus.PENDING:
                monkeypatch.setattr(found.store.executions, "save", save)
                raise DatabaseUnavailable("cut off")
            return stored

        monkeypatch.setattr(found.store.executions, "save", cut_off)
        stored = await ended_record(found, execution)
        assert stored.status is ExecutionStatus.COMPLETED
        assert stored.retry_count == 1


async def test_an_execution_is_not_retried_while_its_instances_state_is_unknown(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not answer gives no information about its instances."""
    async with adoptable(tmp_path) as (found, other):
        observe, unknown = found.driver.observe, 0

        async def observe_late(handle: Handle) -> Observation:
            nonlocal unknown
            unknown += 1
            return Observation(State.UNKNOWN) if unknown <= 3 else await observe(handle)

        code = "import sys, time; print('ready', flush=True); time.sleep(2); print('survived')"
        request = Request(code=code, language=Language.PYTHON)
        running = await found.executions.submit(other.session_id, request)
        async for event in running.stream(0):
            if event.name == "stdout":
                break
        connection = found.connections.reachable(other.session_id)
        assert connection is not None
        monkeypatch.setattr(found.driver, "observe", observe_late)
        connection.link.close()

        stored = await running.wait(SECONDS)
        assert stored.outcome is not None
        assert stored.status is ExecutionStatus.COMPLETED
        assert (stored.outcome.stdout, stored.retry_count) == (b"ready\nsurvived\n", 0)
        assert unknown > 3


async def test_an_execution_is_not_lost_because_its_instance_cannot_be_reached_at_once(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica ran it, and is gone; its executor accepts no connection for a while."""
    async with adoptable(tmp_path) as (found, other):
        code = "import time; print('ready', flush=True); time.sleep(3); print('survived')"
        request = Request(code=code, language=Language.PYTHON)
        running = await found.executions.submit(other.session_id, request)
        async for event in running.stream(0):
            if event.name == "stdout":
                break
        found.runner.detach()
        found.connections.disconnect(other.session_id)
        await found.background.settle(SECONDS)

        connect, refused = found.driver.connect, 0

        async def connect_late(handle: Handle) -> Link:
            nonlocal refused
            refused += 1
            if refused <= 3:
                raise LinkLost("The host is busy.")
            return await connect(handle)

        monkeypatch.setattr(found.driver, "connect", connect_late)
        stored = await found.store.executions.get(running.id)
        assert stored is not None
        adopted = await found.runner.start_from_record(stored, 1)
        ended_execution = await adopted.wait(SECONDS)
        assert refused > 3
        assert ended_execution.outcome is not None
        assert ended_execution.status is ExecutionStatus.COMPLETED
        assert ended_execution.outcome.stdout == b"ready\nsurvived\n"
        assert ended_execution.retry_count == 0


async def test_a_cancelled_execution_stays_cancelled_for_its_next_owner(
    tmp_path: Path, bubblewrap: str
) -> None:
    """Its session leaves the node while it waits for its turn."""
    async with adoptable(tmp_path) as (found, other):
        code = "import time; time.sleep(60)"
        first, queued = [
            await found.executions.submit(
                other.session_id, Request(code=code, language=Language.PYTHON, timeout=90)
            )
            for _ in range(2)
        ]
        released = await found.runner.release_runs(other.session_id)
        assert {run.id for run in released} == {first.id, queued.id}
        await found.runner.cancel(queued, "changed my mind")
        await found.runner.hand_over(released)

        assert await found.coordination.cancelled(queued.id) == "changed my mind"
        assert await found.coordination.cancelled(first.id) is None


async def test_a_result_is_stored_although_no_warning_can_be(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability `execution`, when neither checkpoint nor warning can be written."""
    async with adoptable(tmp_path) as (found, other):
        session = await found.records.get(other.session_id)
        durable = replace(session, durability=Durability.EXECUTION)
        found.connections.disconnect(session.id)
        await found.records.save_silently(durable)

        async def unavailable(*_: object, **__: object) -> None:
            raise DatabaseUnavailable("away")

        monkeypatch.setattr(found.autosave, "checkpoint", unavailable)
        monkeypatch.setattr(found.autosave, "_warn", unavailable)
        request = Request(code="print('done')", language=Language.PYTHON)
        running = await found.executions.submit(session.id, request)
        stored = await running.wait(SECONDS)
        assert stored.outcome is not None
        assert (stored.status, stored.outcome.stdout) == (ExecutionStatus.COMPLETED, b"done\n")
        assert len(stored.attempts) == 1


@pytest.mark.parametrize(
    ("gone", "attempts"),
    [
        pytest.param(True, 2, id="with its instance"),
        pytest.param(False, 1, id="while its instance runs"),
    ],
)
async def test_an_execution_is_retried_if_its_files_were_lost_before_its_result_was_stored(
    tmp_path: Path, bubblewrap: str, monkeypatch: pytest.MonkeyPatch, gone: bool, attempts: int
) -> None:
    """With durability `execution`, on a node whose workspaces end with their instances."""
    async with adoptable(tmp_path) as (found, other):
        session = await found.records.get(other.session_id)
        found.connections.disconnect(session.id)
        await found.records.save_silently(replace(session, durability=Durability.EXECUTION))
        monkeypatch.setattr(found.driver.workspaces, "outlive_instances", False)
        taken: list[str] = []

        async def checkpoint(connection: Connection) -> None:
            taken.append(connection.instance.id)
            if len(taken) > 1:
                return
            if gone:
                await found.driver.destroy(connection.instance.handle)
            connection.link.close()
            await connection.link.closed
            raise LinkLost("gone")

        monkeypatch.setattr(found.autosave, "checkpoint", checkpoint)
        request = Request(code="print('done')", language=Language.PYTHON)
        running = await found.executions.submit(session.id, request)
        stored = await running.wait(SECONDS)
        assert stored.outcome is not None
        assert (stored.status, stored.outcome.stdout) == (ExecutionStatus.COMPLETED, b"done\n")
        assert len(stored.attempts) == attempts
        assert len(set(taken)) == len(taken) == attempts


async def test_a_start_that_has_just_failed_is_not_shared_again(
    tmp_path: Path, bubblewrap: str
) -> None:
    """Its callback, which forgets it, has not run yet: awaiting it would not yield."""
    async with adoptable(tmp_path) as (found, other):
        found.connections.disconnect(other.session_id)
        failed: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        failed.set_exception(SessionNotRunning("stopped"))
        starts = found.starter._shared_starts
        starts[other.session_id] = failed, other.created_at

        connection = await found.starter.connect(other.session_id)
        assert connection.session.id == other.session_id
        assert failed.exception() is not None
