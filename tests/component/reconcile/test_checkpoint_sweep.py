"""The sweep of checkpoints against a blob store that does not remove what one session left."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.blobs.base import UnlistableNames
from atoll.blobs.local import LocalBlobs
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.reconcile.checkpoints import CheckpointSweep
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from atoll.testing import ManualClock
from tests.contract.stores.store_entities import make_checkpoint
from tests.parts import checkpoints_on

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Refusing(LocalBlobs):
    """Does not remove objects with a given name in their prefix."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory)
        self._name = name

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        if self._name in prefix:
            raise UnlistableNames("The test says no.")
        await super().remove_all(prefix)


async def test_a_failed_removal_does_not_prevent_others(tmp_path: Path) -> None:
    given, clock = Settings(data_dir=tmp_path), ManualClock()
    store = SqlStore(
        [f"sqlite:///{tmp_path / 'atoll.db'}"], sqlite=given.sqlite, database=given.database
    )
    leases = Leases(
        MemoryCoordination("replica", given.coordination, timedelta(hours=1), clock),
        clock,
        given.coordination,
    )
    now = clock.now()
    hostile = make_checkpoint(kept_until=now - timedelta(hours=1))
    other = make_checkpoint(kept_until=now - timedelta(minutes=1))
    await store.open()
    try:
        for checkpoint in (hostile, other):
            await store.checkpoints.add(checkpoint)
        blobs = Refusing(tmp_path / "blobs", hostile.id)
        checkpoints = checkpoints_on(store, blobs, leases, clock, "node_1", backups=2)
        await CheckpointSweep(store, checkpoints, clock).once()
        assert await store.checkpoints.get(other.id) is None
        # It is tried again.
        assert await store.checkpoints.get(hostile.id) == hostile
    finally:
        await store.close()
