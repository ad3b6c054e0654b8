"""Executions of one invocation: numbered, each after the other, and one of each number."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.errors import Conflict
from atoll.model.execution import Attempt, ExecutionStatus, Mode, Request
from atoll.model.session import Cause

from .store_entities import (
    NOW,
    ODD_TEXT,
    completed,
    ended,
    following,
    invoked,
    make_execution,
    walk,
)

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


async def failed(store: Store) -> Execution:
    """The only execution of an invocation, which is stored and has failed."""
    execution = invoked()
    await store.executions.add(execution)
    return await store.executions.save(ended(execution))


def superseded(execution: Execution) -> Execution:
    return replace(execution, superseded=True, version=execution.version + 1)


async def of_invocation(store: Store, invocation_id: str | None) -> tuple[Execution, ...]:
    return (await store.executions.page(invocation_id=invocation_id)).items


async def test_rare_fields_of_an_execution_are_stored_unchanged(store: Store) -> None:
    """Tuples stay tuples, strings become enums, null and empty differ."""
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
                mode=Mode.CONSOLE,
                metadata={ODD_TEXT: ODD_TEXT},
            ),
            invocation_id="inv_1",
            ordinal=7,
            superseded=True,
            invoked_at=NOW - timedelta(days=1),
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
    begun = make_execution(attempts=full.attempts)
    for execution in (full, empty, begun):
        await store.executions.add(execution)

        got = await store.executions.get(execution.id)

        assert got == execution
        assert repr(got) == repr(execution)


async def test_an_invocation_has_one_execution_of_each_number(store: Store) -> None:
    first = invoked()
    await store.executions.add(first)
    other = make_execution(invocation_id=first.invocation_id)

    with pytest.raises(Conflict, match=other.id):
        await store.executions.add(other)

    assert await store.executions.get(other.id) is None
    assert await of_invocation(store, first.invocation_id) == (first,)


async def test_executions_without_an_invocation_are_not_counted(store: Store) -> None:
    for _ in range(3):
        await store.executions.add(make_execution())

    assert len((await store.executions.page()).items) == 3


async def test_one_of_many_concurrent_first_executions_of_an_invocation_succeeds(
    store: Store,
) -> None:
    executions = [make_execution(invocation_id="inv_1") for _ in range(30)]

    answers = await asyncio.gather(*map(store.executions.add, executions), return_exceptions=True)

    assert answers.count(None) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 29
    assert await of_invocation(store, "inv_1") == (executions[answers.index(None)],)


async def test_a_refused_first_execution_does_not_affect_concurrent_ones(store: Store) -> None:
    known = invoked()
    await store.executions.add(known)
    executions = [invoked() for _ in range(20)]
    refused = make_execution(invocation_id=known.invocation_id)
    executions.insert(10, refused)

    answers = await asyncio.gather(*map(store.executions.add, executions), return_exceptions=True)

    assert [number for number, answer in enumerate(answers) if answer] == [10]
    assert await store.executions.get(refused.id) is None
    for added in executions[:10] + executions[11:]:
        assert await store.executions.get(added.id) == added


async def test_a_later_execution_supersedes_the_previous_one(store: Store) -> None:
    first = await failed(store)
    second = following(first)

    await store.executions.add_after(second, first)

    assert await of_invocation(store, first.invocation_id) == (second, superseded(first))
    second = await store.executions.save(ended(second, ExecutionStatus.CRASHED))
    third = following(second)
    await store.executions.add_after(third, second)
    assert await of_invocation(store, first.invocation_id) == (
        third,
        superseded(second),
        superseded(first),
    )


async def test_executions_of_an_invocation_are_ordered_by_ordinal_despite_clock_skew(
    store: Store,
) -> None:
    latest = await failed(store)
    made = [latest.id]
    for number in range(6):
        following_one = following(latest, created_at=NOW - timedelta(hours=number % 3))
        await store.executions.add_after(following_one, latest)
        latest = await store.executions.save(ended(following_one))
        made.append(latest.id)

    got = await walk(store.executions.page, 2, invocation_id=latest.invocation_id)

    assert [execution.id for execution in got] == made[::-1]


async def test_a_save_does_not_move_an_execution_in_its_invocation(store: Store) -> None:
    first = await failed(store)
    elsewhere = replace(first, superseded=True, ordinal=9, invocation_id="inv_x", invoked_at=NOW)

    saved = await store.executions.save(elsewhere)

    assert saved.version == first.version + 1
    assert await store.executions.get(first.id) == replace(first, version=saved.version)


async def test_a_superseded_execution_stays_superseded_when_it_is_saved(store: Store) -> None:
    first = await failed(store)
    await store.executions.add_after(following(first), first)

    with pytest.raises(Conflict, match=first.id):
        await store.executions.save(first)
    await store.executions.save(replace(superseded(first), kept={"stdout": "x"}))

    got = await store.executions.get(first.id)
    assert got is not None
    assert (got.superseded, got.kept) == (True, {"stdout": "x"})


async def test_a_changed_or_missing_execution_cannot_be_superseded(store: Store) -> None:
    first = await failed(store)
    second = following(first)

    for wrong in (replace(first, version=1), replace(first, id="exec_none")):
        with pytest.raises(Conflict, match=wrong.id):
            await store.executions.add_after(second, wrong)

    assert await of_invocation(store, first.invocation_id) == (first,)
    assert await store.executions.get(second.id) is None


@pytest.mark.parametrize("taken", ["id", "place"])
async def test_an_execution_with_a_used_id_or_ordinal_supersedes_nothing(
    store: Store, taken: str
) -> None:
    first, other = await failed(store), make_execution()
    await store.executions.add(other)
    second = following(first, id=other.id) if taken == "id" else following(first, ordinal=1)

    with pytest.raises(Conflict, match=second.id):
        await store.executions.add_after(second, first)

    assert await of_invocation(store, first.invocation_id) == (first,)
    assert await store.executions.get(other.id) == other


async def test_one_of_many_concurrent_next_executions_of_an_invocation_succeeds(
    store: Store,
) -> None:
    first = await failed(store)
    others = [following(first) for _ in range(30)]

    answers = await asyncio.gather(
        *(store.executions.add_after(execution, first) for execution in others),
        return_exceptions=True,
    )

    assert answers.count(None) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 29
    winner = others[answers.index(None)]
    assert await of_invocation(store, first.invocation_id) == (winner, superseded(first))


async def test_a_concurrent_result_and_next_execution_are_serialized(
    store: Store,
) -> None:
    for _ in range(10):
        first = invoked()
        await store.executions.add(first)
        second = following(first)

        end, gone_on = await asyncio.gather(
            store.executions.save(ended(first)),
            store.executions.add_after(second, first),
            return_exceptions=True,
        )

        stored = await of_invocation(store, first.invocation_id)
        if gone_on is None:
            assert isinstance(end, Conflict)
            assert stored == (second, superseded(first))
        else:
            assert isinstance(gone_on, Conflict)
            assert stored == (end,)


async def test_latest_lists_executions_that_are_not_superseded(store: Store) -> None:
    alone = [await failed(store) for _ in range(3)]
    first = await failed(store)
    second = following(first, created_at=NOW + timedelta(seconds=1))
    await store.executions.add_after(second, first)
    await store.executions.add(make_execution())

    page = await store.executions.latest()

    assert page.next_cursor is None
    assert [execution.id for execution in page.items] == [
        second.id,
        *sorted((execution.id for execution in alone), reverse=True),
    ]
