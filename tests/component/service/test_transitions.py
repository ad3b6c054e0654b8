"""How the steps towards a wanted state fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.errors import Conflict
from atoll.model.instance import Capabilities, State
from atoll.model.session import SessionStatus, Wanted
from atoll.settings import Settings
from tests.component.reconcile.test_recovery import ObservedNode
from tests.component.reconcile.test_strays import ManualClock
from tests.contract.stores.store_entities import make_instance, make_session
from tests.parts import NODE, put_together

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_pause_that_the_node_refuses_counts_as_one_failure(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    instance = make_instance(session_id="sess_1", workspace="w")
    node = ObservedNode(tmp_path, settings, State.RUNNING, instance)
    node.capabilities = Capabilities(frozenset(), unavailable={"pausing": "no freezer"})
    parts = put_together(tmp_path, ManualClock(), settings=settings, driver=node)
    await parts.open()
    try:
        await parts.store.instances.add(instance)
        await parts.store.sessions.add(
            make_session(
                id="sess_1",
                runtime_node=NODE,
                wanted=Wanted.PAUSED,
                instance_id=instance.id,
                workspace="w",
            )
        )
        with pytest.raises(Conflict, match="no freezer"):
            await parts.transitions.settle("sess_1")
        found = await parts.records.get("sess_1")
        assert (found.status, found.failures) == (SessionStatus.RUNNING, 1)
        assert found.retry_at is not None
    finally:
        await parts.close()
