"""Requests at the worst moment lose no files and no executions, and leave no session stuck."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import Conflict, PermanentError, SpoolFull, TemporaryError
from atoll.link.errors import RequestRefused
from atoll.model.execution import ExecutionStatus, Language, Request
from atoll.model.instance import Observation, State
from atoll.model.node import Node
from atoll.model.session import Cause, SessionStatus, Wanted
from atoll.model.session_changes import moved
from atoll.reconcile.orphaned_instances import ORPHAN_AGE
from atoll.service.sessions.clone import MAX_COPIES
from atoll.service.sessions.new_session import NewSession
from atoll.service.sessions.records import instance_lease
from atoll.service.sessions.update import SessionChange
from tests.integration.troubled import World, kill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.model.execution import Execution
    from atoll.model.instance import Handle
    from atoll.model.page import Page
    from atoll.model.resources import Resources
    from atoll.model.session import Session
    from atoll.service.executions.run import Run
    from atoll.service.instances import ReadyInstance
    from tests.parts import Parts

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(bubblewrap: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.clear()


def _unchanged(resources: Resources) -> Resources:
    return resources


async def new(parts: Parts, **fields: Any) -> Session:
    return await parts.sessions.create(NewSession(_unchanged, fields=fields))


async def executed(parts: Parts, session_id: str, code: str) -> Run:
    request = Request(code=code, language=Language.PYTHON, timeout=20)
    return await parts.executions.submit(session_id, request)


async def test_an_execution_accepted_before_a_pause_resumes_the_session(world: World) -> None:
    parts = world.replicas[0].parts
    if world.replicas[0].driver.pausing is None:
        pytest.skip("This machine has no freezer.")
    session = await new(parts, auto_start=False)
    accepted = world.clock.now()
    assert (await parts.sessions.pause(session.id, wait=10)).status is SessionStatus.PAUSED
    live = await parts.starter.connect(session.id, submitted_at=accepted)
    assert (live.session.status, live.instance.id) == (SessionStatus.RUNNING, session.instance_id)


async def test_an_execution_submitted_during_an_idle_stop_is_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts, idle_timeout=3600)
    page = parts.store.executions.page
    come: list[Run] = []

    async def just_before(**asked: Any) -> Page[Execution]:
        found = await page(**asked)
        if asked.get("status") is ExecutionStatus.PENDING and not come:
            come.append(await executed(parts, session.id, "import time; time.sleep(1)"))
        return found

    monkeypatch.setattr(parts.store.executions, "page", just_before)
    world.clock.ahead += 3601
    await parts.timers.fire(session.id)
    await parts.transitions.settle(session.id)
    ended = await parts.executions.await_end(come[0], 20)
    assert ended.status is ExecutionStatus.COMPLETED
    assert (await parts.sessions.get(session.id)).instance_id == session.instance_id


async def test_a_queued_execution_restarts_a_session_stopped_as_idle(world: World) -> None:
    parts = world.replicas[0].parts
    session = await new(parts, idle_timeout=3600)
    accepted = world.clock.now()
    world.clock.ahead += 3601
    assert await parts.timers.fire(session.id)
    await parts.transitions.settle(session.id)
    assert (await parts.sessions.get(session.id)).status is SessionStatus.STOPPED
    live = await parts.starter.connect(session.id, submitted_at=accepted)
    assert live.session.status is SessionStatus.RUNNING

    # Unless a client stopped it.
    accepted = world.clock.now()
    await parts.sessions.stop(session.id, wait=10)
    with pytest.raises(Conflict):
        await parts.starter.connect(session.id, submitted_at=accepted)


@pytest.mark.parametrize("verb", ["extend", "start"])
async def test_a_session_extended_at_the_last_moment_does_not_end(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts, delete_after=3600)
    await parts.sessions.update(session.id, SessionChange(_unchanged, timeout=3600))
    if verb == "start":
        await parts.sessions.stop(session.id, wait=10)
    get, looked = parts.store.sessions.get, False

    async def meanwhile(session_id: str) -> Session | None:
        nonlocal looked
        found = await get(session_id)
        if not looked:
            looked = True
            if verb == "start":
                await parts.sessions.start(session_id, wait=10)
            else:
                await parts.sessions.update(session_id, SessionChange(_unchanged, timeout=7200))
        return found

    for loop in world.replicas[0].loops:
        if loop.get_name() == "sessions":
            loop.cancel()  # This is the only poller.
    monkeypatch.setattr(parts.store.sessions, "get", meanwhile)
    world.clock.ahead += 3601
    await parts.timers.fire(session.id)
    assert not (await parts.sessions.get(session.id)).status.ended


async def test_files_not_saved_before_a_crash_are_saved_when_the_session_ends(
    world: World,
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    running = await executed(parts, session.id, "open('kept', 'w').write('here')")
    await parts.executions.await_end(running, 10)
    async with parts.leases.lease(instance_lease(session.id), parts.leases.new_owner()):
        await parts.sessions.delete(session.id)
        await world.restart()
    parts = world.replicas[0].parts
    await parts.transitions.settle(session.id)
    assert await parts.autosave._checkpoints.find(session.id, "kept") is not None


async def test_files_of_a_session_with_a_dead_instance_are_saved_at_its_end(world: World) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    session = await new(parts)
    running = await executed(parts, session.id, "open('kept', 'w').write('here')")
    await parts.executions.await_end(running, 10)
    for handle in await driver.handles():
        kill(handle)
    await parts.sessions.delete(session.id)
    await parts.transitions.settle(session.id)
    assert await parts.autosave._checkpoints.find(session.id, "kept") is not None


async def test_a_slow_copy_is_not_removed_as_a_leftover(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = world.replicas[0]
    parts, driver = replica.parts, replica.driver
    session = await new(parts)
    copy = driver.workspaces.copy

    async def slowly(workspace: str, name: str) -> bool:
        copied = await copy(workspace, name)
        for _ in range(3):
            await replica.orphans.once()
            world.clock.ahead += ORPHAN_AGE + 1
        return copied

    monkeypatch.setattr(driver.workspaces, "copy", slowly)
    cloned = await parts.sessions.clone(session.id, SessionChange(_unchanged))
    assert cloned.status is SessionStatus.RUNNING


async def test_a_cancelled_clone_leaves_its_origin_running(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    if driver.pausing is None:
        pytest.skip("This machine has no freezer.")
    session = await new(parts)
    pause, pausing = driver.pausing.pause, asyncio.Event()

    async def pause_and_hang(handle: Handle) -> None:
        await pause(handle)
        pausing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(driver.pausing, "pause", pause_and_hang)
    cloning = asyncio.create_task(parts.sessions.clone(session.id, SessionChange(_unchanged)))
    await pausing.wait()
    cloning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cloning
    instance = await parts.store.instances.get(str(session.instance_id))
    assert instance is not None
    assert (await driver.observe(instance.handle)).state is State.RUNNING


async def has_file(parts: Parts, session_id: str) -> bool:
    code = "import os, sys; sys.exit(not os.path.exists('kept'))"
    running = await executed(parts, session_id, code)
    return (await parts.executions.await_end(running, 10)).status is ExecutionStatus.COMPLETED


async def with_files_of_another(parts: Parts) -> Session:
    session = await new(parts)
    running = await executed(parts, session.id, "open('kept', 'w').write('here')")
    await parts.executions.await_end(running, 10)
    await parts.checkpoint_requests.take(session.id)
    return await parts.sessions.clone(session.id, SessionChange(_unchanged))


async def test_a_session_lost_before_its_first_save_has_its_initial_files(
    world: World,
) -> None:
    parts = world.replicas[0].parts
    cloned = await with_files_of_another(parts)
    parts.connections.disconnect(cloned.id)
    await parts.connections._instances.remove(str(cloned.instance_id))
    await parts.store.sessions.save(
        moved(cloned, Node(cloned.runtime_node, "local", ""), world.clock.now())
    )
    assert await has_file(parts, cloned.id)


async def test_an_emptied_session_stays_empty_when_it_is_archived(world: World) -> None:
    parts = world.replicas[0].parts
    cloned = await with_files_of_another(parts)
    running = await executed(parts, cloned.id, "import os; os.remove('kept')")
    await parts.executions.await_end(running, 10)
    archived = await parts.sessions.archive(cloned.id, wait=20)
    assert archived.status is SessionStatus.ARCHIVED
    assert not await has_file(parts, cloned.id)


async def test_a_session_that_cannot_be_saved_is_stopped_nevertheless(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    monkeypatch.setattr(parts.transitions._stopper, "_checkpoints_at_stop", True)

    async def refused(*_: Any, **__: Any) -> None:
        raise RequestRefused("no", code="no_memory")

    monkeypatch.setattr(parts.autosave._checkpoints, "take", refused)
    stopped = await parts.sessions.stop(session.id, wait=10)
    assert (stopped.status, stopped.instance_id) == (SessionStatus.STOPPED, None)


async def test_a_session_that_cannot_be_archived_is_deleted_after_its_idle_time(
    world: World,
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts, delete_after=3600)
    await parts.sessions.stop(session.id, wait=10)
    world.trouble.set("ensure", "permanent", 1000)
    with pytest.raises(PermanentError):
        await parts.sessions.archive(session.id, wait=10)
    assert (await parts.sessions.get(session.id)).status is SessionStatus.ERROR
    world.clock.ahead += 3601
    await parts.timers.fire(session.id)
    ended = await parts.sessions.get(session.id)
    assert (ended.status, ended.cause) == (SessionStatus.TERMINATED, Cause.IDLE)


async def test_a_session_started_from_one_whose_last_save_failed_has_its_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    await parts.checkpoint_requests.take(session.id)
    monkeypatch.setattr(parts.transitions._stopper, "_checkpoints_at_stop", True)
    monkeypatch.setattr(parts.autosave, "_remote", SimpleNamespace(away=None))
    monkeypatch.setattr(parts.checkpoint_requests, "_has_remote", True)
    running = await executed(parts, session.id, "open('kept', 'w').write('here')")
    await parts.executions.await_end(running, 10)
    checkpoints = parts.autosave._checkpoints
    with monkeypatch.context() as full:

        async def refused(*_: Any, **__: Any) -> None:
            raise SpoolFull("no room")

        full.setattr(checkpoints, "take", refused)
        await parts.sessions.stop(session.id, wait=10)
    await parts.checkpoint_requests.ensure(session.id)
    assert await checkpoints.find(session.id, "kept") is not None


async def test_a_failed_restore_leaves_no_workspace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    session = await new(parts)
    await parts.sessions.archive(session.id, wait=20)
    make, changes = parts.connections._instances.make, 0

    async def meanwhile(session: Session) -> ReadyInstance:
        nonlocal changes
        ready = await make(session)
        if changes < 3:
            changes += 1
            change = SessionChange(_unchanged, labels={"change": str(changes)})
            await parts.sessions.update(session.id, change)
        return ready

    monkeypatch.setattr(parts.connections._instances, "make", meanwhile)
    running = await parts.sessions.start(session.id, wait=20)
    assert (running.status, running.labels) == (SessionStatus.RUNNING, {"change": "3"})
    assert await driver.workspaces.names() == [running.workspace]


async def test_the_number_of_concurrent_workspace_copies_is_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    sessions = [await new(parts) for _ in range(MAX_COPIES + 1)]
    copy, most, now = driver.workspaces.copy, 0, 0
    crowded, go = asyncio.Event(), asyncio.Event()

    async def slowly(workspace: str, name: str) -> bool:
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == MAX_COPIES:
            crowded.set()
        await go.wait()
        now -= 1
        return await copy(workspace, name)

    monkeypatch.setattr(driver.workspaces, "copy", slowly)
    cloning = [
        asyncio.create_task(parts.sessions.clone(session.id, SessionChange(_unchanged)))
        for session in sessions
    ]
    await crowded.wait()
    # A waiting session is not suspended.
    states = []
    for session in sessions:
        instance = await parts.store.instances.get(str(session.instance_id))
        assert instance is not None
        states.append((await driver.observe(instance.handle)).state)
    assert State.RUNNING in states
    go.set()
    for cloned in await asyncio.gather(*cloning):
        assert cloned.status is SessionStatus.RUNNING
    assert most == MAX_COPIES


async def test_a_slow_stop_does_not_delay_the_timers_of_other_sessions(world: World) -> None:
    parts = world.replicas[0].parts
    slow, other = await new(parts, idle_timeout=3600), await new(parts)
    await parts.sessions.update(other.id, SessionChange(_unchanged, timeout=3700))
    async with parts.leases.lease(instance_lease(slow.id), parts.leases.new_owner()):
        world.clock.ahead += 3601
        async with asyncio.timeout(20):
            await parts.reconciler.timers()
            world.clock.ahead += 100
            await parts.reconciler.timers()
        assert (await parts.sessions.get(slow.id)).wanted is Wanted.STOPPED
        assert (await parts.sessions.get(other.id)).status is SessionStatus.TIMEOUT
    await parts.transitions.settle(slow.id)
    assert (await parts.sessions.get(slow.id)).status is SessionStatus.STOPPED


async def test_an_instance_observed_as_gone_is_not_used_despite_its_link(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    session = await new(parts)
    first = await parts.starter.connect(session.id)
    observe = driver.observe

    async def observe_gone(handle: Handle) -> Observation:
        if handle.instance_id == first.instance.id:
            return Observation(State.GONE)
        return await observe(handle)

    monkeypatch.setattr(driver, "observe", observe_gone)
    world.clock.ahead += 60
    assert first.link.alive
    found = await asyncio.gather(*(parts.starter.connect(session.id) for _ in range(5)))
    (instance_id,) = {live.instance.id for live in found}
    assert instance_id != first.instance.id
    assert [item.id for item in await parts.store.instances.all()] == [instance_id]


async def test_an_instance_that_cannot_be_observed_is_trusted_while_its_link_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    session = await new(parts)
    first = await parts.starter.connect(session.id)

    async def fail_to_observe(handle: Handle) -> Observation:
        raise TemporaryError("the node is away")

    monkeypatch.setattr(driver, "observe", fail_to_observe)
    world.clock.ahead += 60
    assert await parts.starter.connect(session.id) is first


async def test_an_execution_submitted_before_a_stop_does_not_start_the_session(
    world: World,
) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    asked_at = world.clock.now()
    await parts.sessions.stop(session.id, wait=10)
    with pytest.raises(Conflict) as refused:
        await parts.starter.connect(session.id, submitted_at=asked_at)
    assert refused.value.code == "session_not_running"
    assert (await parts.sessions.get(session.id)).status is SessionStatus.STOPPED
    live = await parts.starter.connect(session.id)
    assert live.session.status is SessionStatus.RUNNING
