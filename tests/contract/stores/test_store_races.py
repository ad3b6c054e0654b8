"""Concurrent writes: compare-and-set, owners of instances, and cancelled callers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from atoll.errors import AlreadyExists, InstanceTaken, TemporaryError, VersionConflict
from atoll.model.session import SessionStatus

from . import store_entities as make
from .conftest import in_memory_too
from .store_entities import make_execution, make_instance, make_session, make_template

if TYPE_CHECKING:
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


@pytest.mark.quick
@in_memory_too
async def test_a_save_with_an_old_version_is_refused_and_writes_nothing(store: Store) -> None:
    session, execution, template = make_session(), make_execution(), make_template()
    await store.sessions.add(session)
    await store.executions.add(execution)
    await store.templates.add(template)
    newer_session = await store.sessions.save(replace(session, message="first"))
    newer_execution = await store.executions.save(make.completed(execution, stdout=b"first"))
    newer_template = await store.templates.save(replace(template, name="first"))

    with pytest.raises(VersionConflict, match=session.id):
        await store.sessions.save(replace(session, message="second"))
    with pytest.raises(VersionConflict, match=execution.id):
        await store.executions.save(make.completed(execution, stdout=b"second"))
    with pytest.raises(VersionConflict, match=template.id):
        await store.templates.save(replace(template, name="second"))

    assert await store.sessions.get(session.id) == newer_session
    assert await store.executions.get(execution.id) == newer_execution
    assert await store.templates.get(template.id) == newer_template


async def test_saving_a_missing_row_is_refused_and_adds_nothing(store: Store) -> None:
    session, execution = make_session(), make_execution()

    with pytest.raises(VersionConflict, match=session.id):
        await store.sessions.save(session)
    with pytest.raises(VersionConflict, match=execution.id):
        await store.executions.save(execution)

    assert await store.sessions.get(session.id) is None
    assert await store.executions.get(execution.id) is None


@in_memory_too
async def test_exactly_one_of_many_concurrent_saves_succeeds(store: Store) -> None:
    execution = make_execution()
    await store.executions.add(execution)

    answers = await asyncio.gather(
        *(store.executions.save(replace(execution, retry_count=n)) for n in range(100)),
        return_exceptions=True,
    )

    won = [answer for answer in answers if not isinstance(answer, BaseException)]
    lost = [answer for answer in answers if isinstance(answer, VersionConflict)]
    assert (len(won), len(lost)) == (1, 99)
    assert await store.executions.get(execution.id) == won[0]


async def test_concurrent_read_change_save_loses_no_increment(store: Store) -> None:
    execution = make_execution()
    await store.executions.add(execution)

    async def increment() -> None:
        while True:
            read = await store.executions.get(execution.id)
            assert read is not None
            try:
                await store.executions.save(replace(read, retry_count=read.retry_count + 1))
            except VersionConflict:
                continue
            return

    await asyncio.gather(*(increment() for _ in range(20)))

    got = await store.executions.get(execution.id)
    assert got is not None
    assert (got.retry_count, got.version) == (20, 21)


async def test_exactly_one_of_many_concurrent_adds_of_an_id_succeeds(store: Store) -> None:
    execution = make_execution()

    answers = await asyncio.gather(
        *(store.executions.add(replace(execution, retry_count=n)) for n in range(50)),
        return_exceptions=True,
    )

    assert answers.count(None) == 1
    assert sum(isinstance(answer, AlreadyExists) for answer in answers) == 49


async def test_a_session_becomes_the_owner_of_its_instance(store: Store) -> None:
    first, second = make_instance(), make_instance()
    await store.instances.add(first)
    await store.instances.add(second)
    session = make_session(instance_id=first.id)

    await store.sessions.add(session)
    assert await store.instances.get(first.id) == replace(first, session_id=session.id)

    await store.sessions.save(replace(session, instance_id=second.id))
    assert await store.instances.get(second.id) == replace(second, session_id=session.id)


async def test_a_session_can_be_saved_again_with_its_instance(store: Store) -> None:
    instance = make_instance()
    await store.instances.add(instance)
    session = make_session(instance_id=instance.id)
    await store.sessions.add(session)

    saved = await store.sessions.save(replace(session, status=SessionStatus.COMPLETED))

    assert saved.version == 2


@pytest.mark.parametrize("owner", [None, "sess_other"], ids=["not stored", "owned by another"])
async def test_a_session_with_an_unavailable_instance_is_not_written(
    store: Store, owner: str | None
) -> None:
    instance = make_instance(session_id=owner)
    if owner:
        await store.instances.add(instance)
    added, saved = make_session(instance_id=instance.id), make_session()
    await store.sessions.add(saved)

    with pytest.raises(InstanceTaken, match=instance.id):
        await store.sessions.add(added)
    with pytest.raises(InstanceTaken, match=instance.id):
        await store.sessions.save(replace(saved, instance_id=instance.id))

    assert await store.sessions.get(added.id) is None
    assert await store.sessions.get(saved.id) == saved
    assert await store.instances.get(instance.id) == (instance if owner else None)


async def test_a_refused_save_does_not_claim_the_instance(store: Store) -> None:
    instance, session = make_instance(), make_session()
    await store.instances.add(instance)
    await store.sessions.add(session)
    await store.sessions.save(session)

    with pytest.raises(VersionConflict, match=session.id):
        await store.sessions.save(replace(session, instance_id=instance.id))

    assert await store.instances.get(instance.id) == instance


async def test_an_old_version_is_reported_before_a_missing_instance(store: Store) -> None:
    instance = make_instance()
    await store.instances.add(instance)
    session = make_session(instance_id=instance.id)
    await store.sessions.add(session)
    await store.sessions.save(replace(session, instance_id=None))
    await store.instances.remove(instance.id)

    with pytest.raises(VersionConflict, match=session.id):
        await store.sessions.save(replace(session, message="changed"))


async def test_exactly_one_of_many_sessions_gets_an_instance(store: Store) -> None:
    instance = make_instance()
    await store.instances.add(instance)
    wanting = [make_session(instance_id=instance.id) for _ in range(40)]

    answers = await asyncio.gather(*map(store.sessions.add, wanting), return_exceptions=True)

    stored = [session for session in wanting if await store.sessions.get(session.id)]
    assert [type(answer) for answer in answers].count(InstanceTaken) == 39
    assert len(stored) == 1
    assert await store.instances.get(instance.id) == replace(instance, session_id=stored[0].id)


async def test_a_thousand_concurrent_adds_are_all_stored(store: Store) -> None:
    executions = [make_execution() for _ in range(1000)]

    await asyncio.gather(*map(store.executions.add, executions))

    stored = await make.walk(store.executions.page, limit=100)
    assert {execution.id for execution in stored} == {execution.id for execution in executions}


async def test_a_refused_write_does_not_affect_concurrent_ones(store: Store) -> None:
    known = make_execution()
    await store.executions.add(known)
    taken = make_instance(session_id="sess_other")
    await store.instances.add(taken)
    good = [make_execution() for _ in range(30)]
    writes = [store.executions.add(execution) for execution in good]
    writes.insert(0, store.executions.add(known))
    writes.insert(10, store.sessions.add(make_session(instance_id=taken.id)))
    writes.insert(20, store.executions.add(make_execution(retry_count=2**70)))
    writes.append(store.executions.add(make_execution(id="exec_\ud800")))

    answers = await asyncio.gather(*writes, return_exceptions=True)

    assert answers.count(None) == 30
    assert [n for n, answer in enumerate(answers) if answer] == [0, 10, 20, 33]
    assert isinstance(answers[0], AlreadyExists)
    assert isinstance(answers[10], InstanceTaken)
    assert all([await store.executions.get(execution.id) == execution for execution in good])
    assert await make.walk(store.sessions.page, limit=10) == []


async def test_cancelled_callers_do_not_affect_others(store: Store) -> None:
    executions = [make_execution() for _ in range(100)]
    tasks = [asyncio.create_task(store.executions.add(execution)) for execution in executions]
    # One turn of the loop: each has requested its write, none has a response.
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(answer is None for answer in answers[1::2])
    for execution in executions[1::2]:
        assert await store.executions.get(execution.id) == execution
    await store.executions.add(make_execution())


async def test_every_later_read_sees_a_write(store: Store) -> None:
    async def write_and_read() -> None:
        execution = make_execution()
        await store.executions.add(execution)
        reads = await asyncio.gather(*(store.executions.get(execution.id) for _ in range(4)))
        assert reads == [execution] * 4

    await asyncio.gather(*(write_and_read() for _ in range(50)))


async def test_closing_waits_for_writes_in_progress(store: Store) -> None:
    tasks = [asyncio.create_task(store.executions.add(make_execution())) for _ in range(200)]
    await asyncio.sleep(0)

    await store.close()

    assert all(task.done() and task.exception() is None for task in tasks)


async def test_a_closed_store_is_unavailable(store: Store) -> None:
    await store.ping()
    await store.close()
    await store.close()

    with pytest.raises(TemporaryError) as reading:
        await store.ping()
    with pytest.raises(TemporaryError) as writing:
        await store.sessions.add(make_session())

    assert reading.value.code == writing.value.code == "database_unavailable"
