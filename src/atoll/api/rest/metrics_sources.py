"""What metrics are read from. Apart from them, because few processes export metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.blobs.spool import Spool
    from atoll.service.executions.commit import ResultCommit
    from atoll.service.executions.runner import Runner
    from atoll.service.nodes.migration import Migrations
    from atoll.service.nodes.service import Nodes
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.service import Sessions


@dataclass(frozen=True)
class MetricsSources:
    """The services whose counters are exported."""

    sessions: Sessions
    connections: Connections
    runner: Runner
    commit: ResultCommit
    pool: Pool
    spool: Spool | None
    nodes: Nodes
    migrations: Migrations
