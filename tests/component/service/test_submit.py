"""Submitting with an id that may be known already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.clock import SystemClock
from atoll.model.execution import ExecutionStatus, Language, Request
from atoll.model.outcome import without_result
from atoll.model.session import Cause
from atoll.service.executions.records import OwnedElsewhere
from atoll.service.executions.run import Run
from tests.contract.stores.store_entities import make_execution, make_session
from tests.parts import ME, parts

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.model.event import Event
    from atoll.model.execution import Execution

pytestmark = pytest.mark.anyio

OTHER = "replica-other"


async def test_an_execution_recorded_by_another_replica_is_returned(tmp_path: Path) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        session = make_session()
        await found.store.sessions.add(session)
        execution_id = ids.execution_id(clock.now())
        theirs = make_execution(id=execution_id, session_id=session.id, holder=OTHER)
        await found.store.executions.add(theirs)

        request = Request(code="print(1)", language=Language.PYTHON)
        running = await found.executions.submit(session.id, request, execution_id=execution_id)
        assert running.execution == theirs
        assert found.runner.count == 0


async def test_a_result_replaces_a_record_that_this_replica_wrote_without_confirmation(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        execution = make_execution(id=ids.execution_id(clock.now()), holder=ME)
        await found.store.executions.add(execution)
        running = Run(execution, found.settings.execution)
        # That it runs was stored, and the answer of the store was lost.
        await found.store.executions.save(execution)
        ended = without_result(ExecutionStatus.FAILED, Cause.EXIT, "It ended.")
        await found.commit.commit(running, ended)

        stored = await found.store.executions.get(execution.id)
        assert stored is not None
        assert (stored.status, stored.version) == (ExecutionStatus.FAILED, 3)
        assert running.finished


async def test_a_result_does_not_replace_a_record_of_another_replica(tmp_path: Path) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        execution = make_execution(id=ids.execution_id(clock.now()), holder=ME)
        await found.store.executions.add(execution)
        running = Run(execution, found.settings.execution)
        await found.store.executions.save(replace(execution, holder=OTHER))
        ended = without_result(ExecutionStatus.FAILED, Cause.EXIT, "It ended.")
        with pytest.raises(OwnedElsewhere):
            await found.commit.commit(running, ended)


async def test_an_execution_repeated_concurrently_is_not_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        execution = make_execution(id=ids.execution_id(clock.now()), holder=ME)
        await found.store.executions.add(execution)
        executions = found.store.executions
        save = executions.save

        async def repeated_before(changed: Execution, *, event: Event | None = None) -> Execution:
            """The client repeats the request between the read and the write of the revocation."""
            monkeypatch.undo()
            await save(execution)
            return await save(changed, event=event)

        monkeypatch.setattr(executions, "save", repeated_before)
        await found.execution_records.revoke(execution)

        stored = await executions.get(execution.id)
        assert stored is not None
        assert (stored.status, stored.version) == (ExecutionStatus.PENDING, 2)


async def test_an_execution_repeated_since_it_was_read_is_not_revoked(tmp_path: Path) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        execution = make_execution(id=ids.execution_id(clock.now()), holder=ME)
        await found.store.executions.add(execution)
        await found.store.executions.save(execution)
        await found.execution_records.revoke(execution)

        stored = await found.store.executions.get(execution.id)
        assert stored is not None
        assert (stored.status, stored.version) == (ExecutionStatus.PENDING, 2)
