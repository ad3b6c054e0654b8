"""Instances and workspaces without a session are removed; all others stay."""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.workspaces import LocalWorkspaces
from atoll.model.instance import Handle, Instance
from atoll.model.session import SessionStatus
from atoll.reconcile.orphaned_instances import ORPHAN_AGE, OrphanedInstanceSweep
from atoll.settings import Settings
from tests.component.reconcile.test_strays import ManualClock
from tests.contract.stores.store_entities import make_instance, make_session
from tests.parts import Parts, put_together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.drivers.base import Driver

pytestmark = pytest.mark.anyio

ME, OTHER = "replica-me", "replica-other"


class Node(LocalDriver):
    """A node that only lists its instances."""

    def __init__(self, place: Path, settings: Settings, *there: Instance) -> None:
        super().__init__(place, settings.local, settings.link)
        self.there = {instance.id: instance for instance in there}
        self.workspaces = NodeWorkspaces(self.there)

    async def handles(self) -> list[Handle]:
        return [instance.handle for instance in self.there.values()]

    async def destroy(self, handle: Handle) -> None:
        del self.there[handle.instance_id]


class NodeWorkspaces(LocalWorkspaces):
    def __init__(self, there: dict[str, Instance]) -> None:
        self.there = there

    async def names(self) -> list[str]:
        return [instance.workspace for instance in self.there.values()]

    def of(self, handle: Handle) -> str:
        return self.there[handle.instance_id].workspace

    async def discard(self, name: str) -> None: ...


class Environment:
    def __init__(self, node: Node, parts: Parts, sweep: OrphanedInstanceSweep) -> None:
        self.node = node
        self.store = parts.store
        self.sessions = parts.sessions
        self.transitions = parts.transitions
        self.background = parts.background
        self.leases = parts.leases
        self.sweep = sweep
        clock = parts.replica.clock
        assert isinstance(clock, ManualClock)
        self.clock = clock


@asynccontextmanager
async def environment(
    place: Path, *there: Instance, driver: Driver | None = None
) -> AsyncIterator[Environment]:
    settings = Settings(data_dir=place)
    node = Node(place, settings, *there)
    parts = put_together(place, ManualClock(), settings=settings, driver=driver or node)
    await parts.store.open()
    await parts.coordination.open()
    try:
        for instance in there:
            await parts.store.instances.add(instance)
        yield Environment(node, parts, parts.sweep(await parts.store.cluster()))
        await parts.background.settle(30)
    finally:
        await parts.close()


async def test_an_instance_assigned_to_a_session_during_the_sweep_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = make_instance(holder=OTHER)
    async with environment(tmp_path, instance) as found:
        await found.sweep.once()  # Its replica seems to be lost.
        found.clock.time += timedelta(seconds=ORPHAN_AGE)
        all_of_them = found.store.instances.all

        async def assign_first() -> list[Instance]:
            monkeypatch.undo()
            session = make_session(
                instance_id=instance.id,
                workspace=instance.workspace,
                expires_at=found.clock.now() + timedelta(hours=1),
            )
            await found.store.sessions.add(session)
            return await all_of_them()

        monkeypatch.setattr(found.store.instances, "all", assign_first)
        await found.sweep.once()
        assert list(found.node.there) == [instance.id]


async def test_an_instance_of_an_ended_session_is_removed_by_the_next_sweep(
    tmp_path: Path,
) -> None:
    instance, other = make_instance(session_id="sess_ended"), make_instance(session_id="sess_new")
    async with environment(tmp_path, instance, other) as found:
        await found.store.sessions.add(
            make_session(id="sess_ended", status=SessionStatus.TERMINATED)
        )
        # The other is made at this moment, for a session that does not have it yet.
        await found.store.sessions.add(make_session(id="sess_new", status=SessionStatus.CREATING))
        await found.sweep.once()
        assert list(found.node.there) == [other.id]


@pytest.mark.parametrize("here", [True, False])
async def test_an_instance_stays_while_its_files_are_being_saved(
    tmp_path: Path, here: bool
) -> None:
    instance = make_instance(session_id="sess_ended")
    async with environment(tmp_path, instance) as found:
        await found.store.sessions.add(
            make_session(id="sess_ended", status=SessionStatus.TERMINATED)
        )
        async with contextlib.AsyncExitStack() as saving:
            if here:
                found.transitions._clearing.add("sess_ended")
                saving.callback(found.transitions._clearing.clear)
            else:
                await found.leases.start()
                lease = found.leases.lease("instance:sess_ended", "another replica")
                await saving.enter_async_context(lease)
            for _ in range(2):
                await found.sweep.once()
                assert list(found.node.there) == [instance.id]
                found.clock.time += timedelta(seconds=ORPHAN_AGE if here else 1)
        await found.sweep.once()
        assert list(found.node.there) == []


async def test_the_files_of_an_ended_session_stay_until_it_is_cleared(tmp_path: Path) -> None:
    instance = make_instance(session_id="sess_ended", workspace="files")
    async with environment(tmp_path, instance) as found:
        session = make_session(
            id="sess_ended",
            instance_id=instance.id,
            workspace="files",
            status=SessionStatus.TERMINATED,
        )
        await found.store.sessions.add(session)
        for _ in range(2):
            # Its clearing has not begun: many sessions may have ended together, or their replica
            # died.
            await found.sweep.once()
            assert list(found.node.there) == [instance.id]
            found.clock.time += timedelta(seconds=ORPHAN_AGE)
        await found.store.sessions.save(replace(session, instance_id=None, workspace=None))
        await found.sweep.once()
        assert list(found.node.there) == []


async def test_a_sweep_skips_sessions_of_other_nodes(tmp_path: Path) -> None:
    instance = make_instance(node_id="elsewhere", session_id="sess_1")
    async with environment(tmp_path, instance) as found:
        session = make_session(
            id="sess_1", runtime_node="elsewhere", instance_id=instance.id, workspace="w"
        )
        await found.store.sessions.add(session)
        assert (await found.sessions.delete(session.id)).status is SessionStatus.TERMINATED
        await found.background.settle(30)
        assert await found.store.instances.get(instance.id) is not None
        assert list(found.node.there) == [instance.id]
