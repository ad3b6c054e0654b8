"""Invocations whose executions are recorded concurrently by other replicas."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll import ids
from atoll.clock import SystemClock
from atoll.errors import Conflict, InvalidRequest, NotFound
from atoll.model.execution import ExecutionStatus, Mode, Request
from atoll.model.invocation import InvocationStatus
from atoll.service.invocations.service import Invocations
from tests.contract.stores.store_entities import (
    NOW,
    ended,
    following,
    invoked,
    make_execution,
    make_session,
)
from tests.parts import Parts, parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from atoll.model.execution import Execution
    from atoll.model.invocation import Invocation
    from atoll.model.session import Session

pytestmark = pytest.mark.anyio

OTHER = "replica-other"
REQUEST = Request(code="print(1)")


@asynccontextmanager
async def with_session(place: Path) -> AsyncIterator[tuple[Parts, Invocations, Session]]:
    async with parts(place, SystemClock()) as found:
        session = make_session()
        await found.store.sessions.add(session)
        yield found, Invocations(found.store, found.executions), session
        assert found.runner.count == 0


async def failed(found: Parts, session: Session, **options: Any) -> Execution:
    first = invoked(session_id=session.id, holder=OTHER, **options)
    await found.store.executions.add(first)
    return await found.store.executions.save(ended(first))


async def refused(call: Awaitable[object], code: str) -> Conflict:
    with pytest.raises(Conflict) as caught:
        await call
    assert caught.value.code == code
    return caught.value


def write_first(monkeypatch: pytest.MonkeyPatch, found: Parts, writes: Awaitable[None]) -> None:
    """What another replica writes between this one's next look and what it does then."""
    page = found.store.executions.page

    async def too_early(**where: Any) -> Any:
        monkeypatch.setattr(found.store.executions, "page", page)
        seen = await page(**where)
        await writes
        return seen

    monkeypatch.setattr(found.store.executions, "page", too_early)


async def test_a_first_execution_recorded_by_another_replica_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        theirs = invoked(session_id=session.id, holder=OTHER, request=REQUEST)
        write_first(monkeypatch, found, found.store.executions.add(theirs))

        running = await invocations.submit(
            session.id, REQUEST, invocation_id=theirs.invocation_id, execution_id=None
        )

        assert running.execution == theirs


async def test_the_second_of_two_concurrent_executions_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        theirs = invoked(session_id=session.id, holder=OTHER)
        write_first(monkeypatch, found, found.store.executions.add(theirs))

        call = invocations.submit(
            session.id, REQUEST, invocation_id=theirs.invocation_id, execution_id="mine"
        )

        conflict = await refused(call, "invocation_not_failed")
        assert conflict.details == {"status_now": "accepted"}
        assert await found.store.executions.get("mine") is None


async def test_an_invocation_retried_by_another_replica_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        first = await failed(found, session)
        theirs = following(first, holder=OTHER)
        write_first(monkeypatch, found, found.store.executions.add_after(theirs, first))

        call = invocations.submit(
            session.id, REQUEST, invocation_id=first.invocation_id, execution_id="mine"
        )

        await refused(call, "invocation_not_failed")
        assert await found.store.executions.get("mine") is None


async def test_a_used_id_is_refused(tmp_path: Path) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        first = await failed(found, session)
        elsewhere = make_execution(session_id=session.id, invocation_id="inv_other")
        await found.store.executions.add(elsewhere)
        other_session = make_session()
        await found.store.sessions.add(other_session)

        def submit(session_id: str, execution_id: str | None) -> Awaitable[object]:
            return invocations.submit(
                session_id,
                REQUEST,
                invocation_id=first.invocation_id,
                execution_id=execution_id,
            )

        await refused(submit(session.id, elsewhere.id), "execution_id_in_use")
        await refused(submit(other_session.id, None), "invocation_id_in_use")
        # The invocation that a plain execution would be the first of may be taken as well.
        taken = make_execution(session_id=session.id, invocation_id=ids.invocation_id("mine"))
        await found.store.executions.add(taken)
        call = found.executions.submit(session.id, REQUEST, execution_id="mine")
        await refused(call, "invocation_id_in_use")


async def test_a_retried_invocation_has_the_latest_status_and_the_first_time(
    tmp_path: Path,
) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        first = await failed(found, session)
        second = following(
            first,
            created_at=NOW + timedelta(hours=1),
            request=Request(code="1", mode=Mode.SYNC, metadata={"k": "v"}),
        )
        await found.store.executions.add_after(second, first)
        assert first.invocation_id is not None

        got = await invocations.get(first.invocation_id)

        assert (got.execution_id, got.created_at) == (second.id, first.created_at)
        assert (got.status, got.completed_at) == (InvocationStatus.ACCEPTED, None)
        assert (got.mode, got.metadata) == (Mode.SYNC, {"k": "v"})
        stored = await found.store.executions.get(first.id)
        assert stored is not None
        assert await invocations.of(stored) == await invocations.of(second) == got


async def test_an_execution_without_an_invocation_id_is_not_an_invocation(tmp_path: Path) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        old = make_execution(session_id=session.id)
        await found.store.executions.add(old)

        with pytest.raises(NotFound):
            await invocations.get(ids.invocation_id(old.id))
        page = await invocations.list(session_id=None, status=None, cursor=None, limit=10)
        assert page.items == ()


async def test_failed_invocations_include_every_unsuccessful_status_across_pages(
    tmp_path: Path,
) -> None:
    async with with_session(tmp_path) as (found, invocations, session):
        made = []
        for number, status in enumerate([*ExecutionStatus] * 3):
            execution = invoked(
                session_id=session.id, created_at=NOW + timedelta(microseconds=number)
            )
            await found.store.executions.add(ended(execution, status))
            if status in ("failed", "timeout", "crashed"):
                made.append(execution.invocation_id)

        got: list[Invocation] = []
        cursor = None
        while True:
            page = await invocations.list(
                session_id=session.id, status=InvocationStatus.FAILED, cursor=cursor, limit=2
            )
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break

        assert [invocation.id for invocation in got] == made[::-1]
        with pytest.raises(InvalidRequest):
            await invocations.list(session_id=None, status=None, cursor="x", limit=2)


def test_every_execution_id_has_its_own_invocation_id() -> None:
    several = ["a", "exec_a", "inv_a", "x" * 64, "x" * 63 + "y", "exec_" + "x" * 59, "exec_"]

    found = {ids.invocation_id(execution_id) for execution_id in several}

    assert len(found) == len(several)
    assert max(map(len, found)) <= 64
    assert ids.invocation_id("exec_20260301_ab") == "inv_20260301_ab"
