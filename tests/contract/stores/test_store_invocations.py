"""Invocations: written with their executions in one transaction, ended by the latest of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from atoll.errors import Conflict
from atoll.model.execution import Attempt, ExecutionStatus, Request
from atoll.model.invocation import STATUS_OF, InvocationStatus, Mode
from atoll.model.session import Cause

from . import store_entities as make
from .store_entities import NOW, ODD_TEXT, completed, invoked, make_execution

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.model.invocation import Invocation
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio

shared = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ENDS = [status for status in ExecutionStatus if status.ended]


def ended(execution: Execution, status: ExecutionStatus) -> Execution:
    return replace(completed(execution, status=status), status=status)


async def failed(store: Store) -> tuple[Execution, Invocation]:
    """An invocation whose only execution, which is stored too, has failed."""
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)
    execution = await store.executions.save(ended(execution, ExecutionStatus.CRASHED))
    found = await store.invocations.get(invocation.id)
    assert found is not None
    assert found.status is InvocationStatus.FAILED
    return execution, found


@shared
@given(invocation=make.invocations)
async def test_an_invocation_comes_back_equal(store: Store, invocation: Invocation) -> None:
    await store.executions.add(make_execution(invocation_id=invocation.id), invocation)

    assert await store.invocations.get(invocation.id) == invocation


async def test_what_is_new_in_an_execution_comes_back_as_it_was(store: Store) -> None:
    """Tuples as tuples, words as enums, none and empty apart."""
    attempt = Attempt(NOW, NOW + timedelta(microseconds=1), "node", None, Cause.EVICTED, ODD_TEXT)
    full = completed(
        make_execution(
            request=Request(
                function_name="main:handle",
                body="AP8=",
                content_type="image/png",
                context_id="ctx_1",
                terminal=(24, 80),
                stdin_open=True,
            ),
            invocation_id="inv_1",
            attempts=(attempt, replace(attempt, instance_id="inst_1", cause=None, message=None)),
        ),
        results_json=b"[\xff]",
        log=((1, 3), (2, 0), (5, 2**31)),
    )
    empty = completed(
        make_execution(request=Request(function_name="", body="", content_type="", context_id="")),
        results_json=b"",
        log=(),
    )
    for execution in (full, empty):
        await store.executions.add(execution)

        got = await store.executions.get(execution.id)

        assert got == execution
        assert repr(got) == repr(execution)


async def test_the_words_of_an_invocation_come_back_as_enums(store: Store) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, replace(invocation, mode=Mode.CONSOLE))

    got = await store.invocations.get(invocation.id)

    assert got is not None
    assert got.mode is Mode.CONSOLE
    assert not got.status.ended


async def test_an_invocation_that_is_not_there_reads_as_none(store: Store) -> None:
    assert await store.invocations.get("inv_none") is None


async def test_an_execution_that_exists_leaves_no_invocation_behind(store: Store) -> None:
    known = make_execution()
    await store.executions.add(known)
    _, invocation = invoked()

    with pytest.raises(Conflict, match=known.id):
        await store.executions.add(replace(known, invocation_id=invocation.id), invocation)

    assert await store.invocations.get(invocation.id) is None
    assert await store.executions.get(known.id) == known


async def test_an_invocation_that_exists_leaves_no_execution_behind(store: Store) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)
    other = make_execution(invocation_id=invocation.id)

    with pytest.raises(Conflict, match=invocation.id):
        await store.executions.add(other, replace(invocation, execution_id=other.id))

    assert await store.executions.get(other.id) is None
    assert await store.invocations.get(invocation.id) == invocation


async def test_of_many_adds_of_one_invocation_one_wins_and_leaves_one_execution(
    store: Store,
) -> None:
    _, invocation = invoked()
    executions = [make_execution(invocation_id=invocation.id) for _ in range(30)]

    answers = await asyncio.gather(
        *(
            store.executions.add(execution, replace(invocation, execution_id=execution.id))
            for execution in executions
        ),
        return_exceptions=True,
    )

    assert answers.count(None) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 29
    winner = executions[answers.index(None)]
    assert (await store.executions.page(invocation_id=invocation.id)).items == (winner,)
    assert await store.invocations.get(invocation.id) == replace(invocation, execution_id=winner.id)


async def test_a_refused_pair_does_not_disturb_those_beside_it(store: Store) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)
    pairs = [invoked() for _ in range(20)]
    refused = make_execution(invocation_id=invocation.id)
    pairs.insert(10, (refused, invocation))

    answers = await asyncio.gather(
        *(store.executions.add(*pair) for pair in pairs), return_exceptions=True
    )

    assert [number for number, answer in enumerate(answers) if answer] == [10]
    assert await store.executions.get(refused.id) is None
    for added, of in pairs[:10] + pairs[11:]:
        assert await store.executions.get(added.id) == added
        assert await store.invocations.get(of.id) == of


@pytest.mark.parametrize("status", ENDS)
async def test_an_execution_that_ends_ends_its_invocation(
    store: Store, status: ExecutionStatus
) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)

    saved = await store.executions.save(ended(execution, status))

    assert await store.invocations.get(invocation.id) == replace(
        invocation, status=STATUS_OF[status], completed_at=saved.completed_at, version=2
    )


async def test_an_execution_that_goes_on_leaves_its_invocation_alone(store: Store) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)

    running = await store.executions.save(replace(execution, status=ExecutionStatus.RUNNING))
    await store.executions.save(replace(running, status=ExecutionStatus.PENDING, retry_count=1))

    assert await store.invocations.get(invocation.id) == invocation


async def test_an_execution_that_ended_and_is_saved_again_changes_no_invocation(
    store: Store,
) -> None:
    execution, invocation = await failed(store)
    later = NOW + timedelta(days=1)

    await store.executions.save(replace(execution, completed_at=later))

    assert await store.invocations.get(invocation.id) == invocation


async def test_a_refused_save_does_not_end_the_invocation(store: Store) -> None:
    execution, invocation = invoked()
    await store.executions.add(execution, invocation)
    await store.executions.save(replace(execution, holder="another"))

    with pytest.raises(Conflict, match=execution.id):
        await store.executions.save(completed(execution))

    assert await store.invocations.get(invocation.id) == invocation


async def test_an_execution_without_invocation_ends_alone(store: Store) -> None:
    _, invocation = invoked()
    execution = make_execution(id=invocation.execution_id)
    await store.executions.add(execution, invocation)

    await store.executions.save(completed(execution))

    assert await store.invocations.get(invocation.id) == invocation


async def test_an_execution_of_an_invocation_that_is_not_there_ends_all_the_same(
    store: Store,
) -> None:
    execution = make_execution(invocation_id="inv_none")
    await store.executions.add(execution)

    assert (await store.executions.save(completed(execution))).version == 2
    assert await store.invocations.get("inv_none") is None


async def test_another_execution_makes_the_invocation_accepted_again(store: Store) -> None:
    _, invocation = await failed(store)
    second = make_execution(invocation_id=invocation.id, session_id="sess_2")

    await store.executions.add_to(second, invocation)

    assert await store.executions.get(second.id) == second
    assert await store.invocations.get(invocation.id) == replace(
        invocation,
        execution_id=second.id,
        status=InvocationStatus.ACCEPTED,
        completed_at=None,
        version=invocation.version + 1,
    )
    await store.executions.save(completed(second))
    got = await store.invocations.get(invocation.id)
    assert got is not None
    assert (got.status, got.version) == (InvocationStatus.SUCCEEDED, invocation.version + 2)


@pytest.mark.parametrize("status", ENDS)
async def test_an_execution_that_is_not_the_latest_does_not_end_the_invocation(
    store: Store, status: ExecutionStatus
) -> None:
    first, invocation = invoked()
    await store.executions.add(first, invocation)
    second = make_execution(invocation_id=invocation.id)
    await store.executions.add_to(second, invocation)

    await store.executions.save(ended(first, status))

    assert await store.invocations.get(invocation.id) == replace(
        invocation, execution_id=second.id, version=2
    )


async def test_an_execution_that_exists_does_not_become_the_latest(store: Store) -> None:
    first, invocation = await failed(store)

    with pytest.raises(Conflict, match=first.id):
        await store.executions.add_to(first, invocation)

    assert await store.invocations.get(invocation.id) == invocation


async def test_an_invocation_that_moved_on_or_is_not_there_takes_no_execution(
    store: Store,
) -> None:
    _, invocation = await failed(store)
    second = make_execution(invocation_id=invocation.id)

    for wrong in (replace(invocation, version=1), replace(invocation, id="inv_none")):
        with pytest.raises(Conflict, match=wrong.id):
            await store.executions.add_to(second, wrong)

    assert await store.executions.get(second.id) is None
    assert await store.invocations.get(invocation.id) == invocation


async def test_of_many_that_go_on_with_one_invocation_exactly_one_does(store: Store) -> None:
    first, invocation = await failed(store)
    others = [make_execution(invocation_id=invocation.id) for _ in range(30)]

    answers = await asyncio.gather(
        *(store.executions.add_to(execution, invocation) for execution in others),
        return_exceptions=True,
    )

    assert answers.count(None) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 29
    winner = others[answers.index(None)]
    stored = (await store.executions.page(invocation_id=invocation.id)).items
    assert {execution.id for execution in stored} == {first.id, winner.id}
    got = await store.invocations.get(invocation.id)
    assert got is not None
    assert (got.execution_id, got.version) == (winner.id, invocation.version + 1)


async def test_an_end_and_another_execution_at_once_leave_what_one_order_would(
    store: Store,
) -> None:
    for _ in range(10):
        first, invocation = invoked()
        await store.executions.add(first, invocation)
        second = make_execution(invocation_id=invocation.id)

        end, gone_on = await asyncio.gather(
            store.executions.save(ended(first, ExecutionStatus.FAILED)),
            store.executions.add_to(second, invocation),
            return_exceptions=True,
        )

        assert not isinstance(end, BaseException)
        got = await store.invocations.get(invocation.id)
        assert got is not None
        if gone_on is None:
            assert (got.execution_id, got.status) == (second.id, InvocationStatus.ACCEPTED)
        else:
            assert isinstance(gone_on, Conflict)
            assert (got.execution_id, got.status) == (first.id, InvocationStatus.FAILED)
            assert await store.executions.get(second.id) is None
