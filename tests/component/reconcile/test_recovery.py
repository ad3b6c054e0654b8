"""What a replica does with the instances that it finds when it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.model.instance import Handle, Instance, Observation, State
from atoll.settings import Settings
from tests.component.reconcile.test_orphans import Node, NodeWorkspaces
from tests.component.reconcile.test_strays import ManualClock
from tests.contract.stores.store_entities import make_instance, make_session
from tests.parts import NODE, put_together

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class ObservedNode(Node):
    def __init__(self, place: Path, settings: Settings, state: State, *there: Instance) -> None:
        super().__init__(place, settings, *there)
        self.state = state
        self.discarded: set[str] = set()
        self.workspaces = ObservedWorkspaces(dict(self.there), self.discarded)

    async def observe(self, handle: Handle) -> Observation:
        return Observation(self.state)


class ObservedWorkspaces(NodeWorkspaces):
    def __init__(self, there: dict[str, Instance], discarded: set[str]) -> None:
        super().__init__(there)
        self.discarded = discarded

    async def discard(self, name: str) -> None:
        self.discarded.add(name)


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (State.RUNNING, {"inst_owned"}),
        (State.PAUSED, {"inst_owned"}),
        (State.UNKNOWN, {"inst_owned", "inst_ownerless", "inst_unrecorded"}),
        (State.EXITED, set[str]()),
        (State.GONE, set[str]()),
    ],
)
async def test_a_restart_keeps_instances_of_sessions_and_those_that_cannot_be_observed(
    tmp_path: Path, state: State, left: set[str]
) -> None:
    session = make_session(id="sess_1", runtime_node=NODE, instance_id="inst_owned", workspace="w1")
    owned = make_instance(id="inst_owned", session_id="sess_1", workspace="w1")
    ownerless = make_instance(id="inst_ownerless", session_id="sess_gone", workspace="w2")
    unrecorded = make_instance(id="inst_unrecorded", workspace="w3")
    settings = Settings(data_dir=tmp_path)
    node = ObservedNode(tmp_path, settings, state, owned, ownerless, unrecorded)
    parts = put_together(tmp_path, ManualClock(), settings=settings, driver=node)
    await parts.open()
    try:
        await parts.store.instances.add(owned)
        await parts.store.instances.add(ownerless)
        await parts.store.sessions.add(session)
        await parts.recovery.run()
        assert set(node.there) == left
        assert node.discarded == ({"w2", "w3"} if state is not State.UNKNOWN else set())
        recorded = {instance.id for instance in await parts.store.instances.all()}
        assert recorded == left - {"inst_unrecorded"}
        found = await parts.records.get("sess_1")
        assert (found.instance_id, found.workspace) == ("inst_owned", "w1")
    finally:
        parts.timers.close()
        await parts.close()
