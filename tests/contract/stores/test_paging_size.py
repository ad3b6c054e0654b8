"""A page is bounded by bytes as well as by items."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from atoll.model.execution import Execution, ExecutionStatus, Outcome, Request
from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


async def test_a_page_of_large_executions_ends_before_it_fills_memory(store: Store) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    outcome = Outcome(ExecutionStatus.COMPLETED, None, 0, stdout=b"x" * 1_000_000)
    for number in range(20):
        pending = Execution(
            id=f"exec_{number:02}",
            session_id="sess_1",
            request=Request(code="print()"),
            status=ExecutionStatus.PENDING,
            created_at=start + timedelta(seconds=number),
        )
        await store.executions.add(pending)
        await store.executions.save(
            dataclasses.replace(pending, status=outcome.status, outcome=outcome)
        )

    seen: list[str] = []
    cursor = None
    while True:
        page = await store.executions.page(session_id="sess_1", cursor=cursor, limit=20)
        assert 1 <= len(page.items) < 10
        seen += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert seen == [f"exec_{number:02}" for number in reversed(range(20))]
