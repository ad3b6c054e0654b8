"""Attempts that are lost with their instance, while the record of the execution changes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.clock import SystemClock
from atoll.errors import DatabaseUnavailable
from atoll.model.execution import Execution, ExecutionStatus, Language, Request
from atoll.model.instance import Observation, State
from tests.component.service.test_session_records import create
from tests.contract.stores.store_entities import make_execution
from tests.parts import ME, Parts, parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link
    from atoll.model.event import Event
    from atoll.model.instance import Handle

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
