"""Submitting with an id that may be known already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.clock import SystemClock
from atoll.model.execution import Execution, Language, Request
from tests.contract.stores.store_entities import make_execution, make_session
from tests.parts import parts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

OTHER = "replica-other"


async def test_what_another_replica_records_at_the_same_time_is_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        session = make_session()
        await found.store.sessions.add(session)
        get, execution_id = found.store.executions.get, ids.execution_id(clock.now())
        theirs = make_execution(id=execution_id, session_id=session.id, holder=OTHER)

        async def too_early(sought: str) -> Execution | None:
            monkeypatch.setattr(found.store.executions, "get", get)
            await found.store.executions.add(theirs)
            return None

        monkeypatch.setattr(found.store.executions, "get", too_early)
        request = Request(code="print(1)", language=Language.PYTHON)
        running = await found.executions.submit(session.id, request, execution_id=execution_id)
        assert running.execution == theirs
        assert found.runs.count == 0
