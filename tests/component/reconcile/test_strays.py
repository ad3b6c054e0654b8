"""Executions that were recorded although their submission was reported as failed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.model.execution import ExecutionStatus
from atoll.reconcile.executions import STRAY_AGE, ExecutionAdoption
from tests.contract.stores.store_entities import (
    NOW,
    completed,
    make_execution,
    make_session,
)
from tests.parts import ME, parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.stores.stale_cache import CachingStore

pytestmark = pytest.mark.anyio


class ManualClock:
    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.time.timestamp()


@asynccontextmanager
async def adoption(
    place: Path, clock: ManualClock
) -> AsyncIterator[tuple[ExecutionAdoption, CachingStore]]:
    """That of a replica that has begun nothing, so the driver is never asked."""
    async with parts(place, clock) as found:
        yield (
            found.adoption,
            found.store,
        )


async def test_a_stray_execution_ends_without_having_run_when_it_is_old_enough(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with adoption(tmp_path, clock) as (found, store):
        stray = make_execution(holder=ME)
        await store.executions.add(stray)

        # Its submission may still be in progress, without a response yet.
        clock.time += STRAY_AGE - timedelta(microseconds=1)
        await found.once()
        assert await store.executions.get(stray.id) == stray

        clock.time += timedelta(microseconds=1)
        await found.once()
        ended = await store.executions.get(stray.id)
        assert ended is not None
        assert ended.status is ExecutionStatus.CRASHED
        assert ended.started_at is None
        assert ended.outcome is not None
        assert ended.outcome.error is not None
        assert "was not run" in ended.outcome.error["message"]

        clock.time += timedelta(days=1)
        await found.once()
        assert await store.executions.get(stray.id) == ended


async def test_many_stray_executions_end_and_ended_ones_are_unchanged(tmp_path: Path) -> None:
    clock = ManualClock()
    async with adoption(tmp_path, clock) as (found, store):
        strays = [make_execution(holder=ME) for _ in range(250)]
        young = make_execution(holder=ME, created_at=NOW + timedelta(seconds=30))
        done = make_execution(holder=ME)
        for execution in (*strays, young, done):
            await store.executions.add(execution)
        done = await store.executions.save(replace(completed(done), holder=ME))

        clock.time += STRAY_AGE + timedelta(seconds=1)
        await found.once()
        assert [execution.id for execution in await store.executions.unfinished(limit=300)] == [
            young.id
        ]
        assert await store.executions.get(done.id) == done


async def test_a_stray_execution_of_a_moved_session_is_skipped(tmp_path: Path) -> None:
    clock = ManualClock()
    async with adoption(tmp_path, clock) as (found, store):
        session = make_session(runtime_node="elsewhere")
        await store.sessions.add(session)
        execution = make_execution(session_id=session.id, holder="lost")
        await store.executions.add(execution)
        # This replica took it over before the session moved, although the store did not confirm
        # that.
        taken = await store.executions.save(replace(execution, holder=ME))

        clock.time += STRAY_AGE + timedelta(seconds=1)
        await found.once()
        left = await store.executions.get(execution.id)
        assert left == replace(taken, holder=None, version=taken.version + 1)
        await found.once()
        assert await store.executions.get(execution.id) == left, "nor is it adopted here"
