"""What every service of one replica works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.coordination.leases import Leases
    from atoll.service.background import BackgroundTasks
    from atoll.stores.stale_cache import CachingStore


@dataclass(frozen=True)
class Replica:
    """One process of the control plane, and the node whose instances it reaches."""

    node_id: str
    store: CachingStore
    coordination: Coordination
    leases: Leases
    background: BackgroundTasks
    clock: Clock

    @property
    def id(self) -> str:
        return self.leases.replica
