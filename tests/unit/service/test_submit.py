"""Submitting with an id that may be known already."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.blobs.objects import LocalObjects
from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.model.execution import Execution, Language, Request
from atoll.service.approvals import Approvals
from atoll.service.attempts import Attempts
from atoll.service.bulk import Bulk
from atoll.service.ends import Ends
from atoll.service.executions import Executions
from atoll.service.leases import Leases
from atoll.service.lives import Lives
from atoll.service.pool import Pool
from atoll.service.runs import Runs
from atoll.service.sessions import Sessions
from atoll.service.tasks import Tasks
from atoll.service.templates import Templates
from atoll.settings import Settings
from atoll.stores.recall import RecallingStore
from atoll.stores.sql.store import SqlStore
from tests.contract.stores.store_entities import make_execution, make_session

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

ME, OTHER = "replica-me", "replica-other"


async def test_what_another_replica_records_at_the_same_time_is_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, clock, tasks = Settings(data_dir=tmp_path), SystemClock(), Tasks()
    url = f"sqlite:///{tmp_path / 'atoll.db'}"
    store = RecallingStore(
        SqlStore([url], sqlite=settings.sqlite, database=settings.database), clock, settings.recall
    )
    coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    driver = LocalDriver(tmp_path, settings.local, settings.link)
    leases = Leases(coordination, clock, settings.coordination)
    pool = Pool(store, driver, clock, "local", ME, ephemeral=False)
    templates = Templates(store, driver, coordination, clock, settings)
    lives = Lives(store, driver, pool, templates, leases, tasks, clock, "local")
    sessions = Sessions(store, driver, pool, templates, lives, tasks, clock, settings, "local")
    bulk = Bulk(LocalObjects(tmp_path / "blobs"), settings.blob)
    ends = Ends(store, bulk, coordination, clock)
    attempts = Attempts(driver, lives, bulk, leases, clock, settings.execution, settings.link)
    approvals = Approvals(coordination, lives, tasks)
    runs = Runs(
        store,
        sessions,
        lives,
        bulk,
        attempts,
        ends,
        coordination,
        leases,
        approvals,
        tasks,
        clock,
        settings.execution,
        "local",
    )
    executions = Executions(
        store, lives, runs, ends, bulk, coordination, leases, approvals, tasks, clock, settings
    )
    await store.open()
    await coordination.open()
    await leases.start()
    try:
        session = make_session()
        await store.sessions.add(session)
        get, execution_id = store.executions.get, ids.execution_id(clock.now())
        theirs = make_execution(id=execution_id, session_id=session.id, holder=OTHER)

        async def too_early(sought: str) -> Execution | None:
            monkeypatch.setattr(store.executions, "get", get)
            await store.executions.add(theirs)
            return None

        monkeypatch.setattr(store.executions, "get", too_early)
        request = Request(code="print(1)", language=Language.PYTHON)
        running = await executions.submit(session.id, request, execution_id=execution_id)
        assert running.execution == theirs
        assert runs.count == 0
    finally:
        await tasks.settle(0)
        await coordination.close()
        await store.close()
