"""Back-ends that keep everything in the memory of this process."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.blobs.obstore_blobs import ObstoreBlobs
from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination, MemoryState
from atoll.settings import CoordinationSettings, DatabaseSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from atoll.blobs.base import Blobs
    from atoll.clock import Clock

CONCURRENCY = 8


def memory_store() -> SqlStore:
    """An empty store, to be opened and closed like any other."""
    return SqlStore(["sqlite:///:memory:"], sqlite=SqliteSettings(), database=DatabaseSettings())


def memory_coordination(
    replica: str,
    *,
    clock: Clock | None = None,
    state: MemoryState | None = None,
    settings: CoordinationSettings | None = None,
) -> MemoryCoordination:
    """Coordination of one replica; those that share a `state` see each other."""
    return MemoryCoordination(
        replica,
        settings or CoordinationSettings(),
        timedelta(hours=1),
        clock or SystemClock(),
        state=state,
    )


def memory_blobs() -> Blobs:
    """An empty blob store."""
    # Only here: starting obstore takes time that other tests need not spend.
    from obstore.store import MemoryStore

    store = MemoryStore()
    return ObstoreBlobs(lambda: store, concurrency=CONCURRENCY)
