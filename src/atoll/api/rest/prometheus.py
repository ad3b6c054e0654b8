"""
Numbers for Prometheus, taken from the services when they are asked for: no cost while nobody asks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from atoll.blobs.spool import Spool
    from atoll.service.executions.runner import Runner
    from atoll.service.nodes.migration import Migrations
    from atoll.service.nodes.service import Nodes
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.service import Sessions


class _Collector:
    def __init__(
        self,
        sessions: Sessions,
        connections: Connections,
        runs: Runner,
        pool: Pool,
        spool: Spool | None,
        nodes: Nodes,
        migrations: Migrations,
    ) -> None:
        self._nodes = nodes
        self._migrations = migrations
        self._sessions = sessions
        self._connections = connections
        self._runs = runs
        self._pool = pool
        self._spool = spool

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        started = CounterMetricFamily(
            "atoll_sessions_created", "Sessions created, by how they started.", labels=["start"]
        )
        for start, count in self._sessions.created.items():
            started.add_metric([start], count)
        yield started
        yield GaugeMetricFamily(
            "atoll_sessions_live", "Sessions that this process reaches.", self._connections.count
        )
        ended = CounterMetricFamily(
            "atoll_executions", "Executions that have ended, by status.", labels=["status"]
        )
        for status, count in self._runs.finished.items():
            ended.add_metric([status], count)
        yield ended
        yield CounterMetricFamily(
            "atoll_execution_seconds", "Time that executions took.", self._runs.seconds
        )
        yield GaugeMetricFamily(
            "atoll_executions_running",
            "Executions under way, waiting ones too.",
            self._runs.count,
        )
        ready = GaugeMetricFamily(
            "atoll_pool_ready", "Ready instances, by template.", labels=["template"]
        )
        for template, count in self._pool.sizes().items():
            ready.add_metric([template], count)
        yield ready
        yield from self._of_nodes()
        yield from self._pools()
        if self._spool is not None:
            away, waiting = self._spool.away, self._spool.usage
            yield GaugeMetricFamily(
                "atoll_blobs_away", "1 while the blob store does not answer.", away is not None
            )
            yield GaugeMetricFamily(
                "atoll_spool_objects", "What waits on this node for it.", waiting.objects
            )
            yield GaugeMetricFamily("atoll_spool_bytes", "How large that is.", waiting.size)

    def _of_nodes(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        by_status: Counter[tuple[str, bool]] = Counter()
        sessions = GaugeMetricFamily(
            "atoll_node_sessions", "Sessions with an instance, by node.", labels=["node"]
        )
        for node in self._nodes.known:
            by_status[node.status.value, node.cordoned] += 1
            sessions.add_metric([node.id], node.sessions)
        nodes = GaugeMetricFamily(
            "atoll_nodes", "Nodes as last reported, by status.", labels=["status", "cordoned"]
        )
        for (status, cordoned), count in by_status.items():
            nodes.add_metric([status, str(cordoned).lower()], count)
        yield nodes
        yield sessions
        moved = CounterMetricFamily(
            "atoll_sessions_moved",
            "Sessions that this process has moved to another node, by cause.",
            labels=["cause"],
        )
        for cause, count in self._migrations.moved.items():
            moved.add_metric([cause], count)
        yield moved

    def _pools(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        by = ["template"]
        target = GaugeMetricFamily(
            "atoll_pool_target", "Instances that are to be ready, by template.", labels=by
        )
        start = GaugeMetricFamily(
            "atoll_pool_start_seconds", "What a start takes, by template.", labels=by
        )
        hits = CounterMetricFamily(
            "atoll_pool_hits", "Creates that found a ready instance, by template.", labels=by
        )
        misses = CounterMetricFamily(
            "atoll_pool_misses", "Creates that found none, by template.", labels=by
        )
        for template, plan in self._pool.plans.items():
            target.add_metric([template], plan.target)
            seconds = self._pool.stats.start_seconds(template)
            if seconds is not None:
                start.add_metric([template], seconds)
            hit, missed = self._pool.stats.counts(template)
            hits.add_metric([template], hit)
            misses.add_metric([template], missed)
        yield from (target, start, hits, misses)


def register(
    registry: CollectorRegistry,
    sessions: Sessions,
    connections: Connections,
    runs: Runner,
    pool: Pool,
    spool: Spool | None,
    nodes: Nodes,
    migrations: Migrations,
) -> None:
    registry.register(_Collector(sessions, connections, runs, pool, spool, nodes, migrations))
