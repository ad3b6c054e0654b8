"""Metrics for Prometheus, read from the services when Prometheus asks for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from atoll.api.rest.metrics_sources import MetricsSources


class _Collector:
    def __init__(self, sources: MetricsSources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        started = CounterMetricFamily(
            "atoll_sessions_created", "Sessions created, by how they started.", labels=["start"]
        )
        for start, count in self._sources.sessions.created.items():
            started.add_metric([start], count)
        yield started
        yield GaugeMetricFamily(
            "atoll_sessions_live",
            "Sessions that this process has a connection to.",
            self._sources.connections.count,
        )
        ended = CounterMetricFamily(
            "atoll_executions", "Ended executions, by status.", labels=["status"]
        )
        for status, count in self._sources.commit.finished.items():
            ended.add_metric([status], count)
        yield ended
        yield CounterMetricFamily(
            "atoll_execution_seconds",
            "Total run time of ended executions.",
            self._sources.commit.seconds,
        )
        yield GaugeMetricFamily(
            "atoll_executions_running",
            "Unfinished executions, including waiting ones.",
            self._sources.runner.count,
        )
        ready = GaugeMetricFamily(
            "atoll_pool_ready", "Ready instances, by template.", labels=["template"]
        )
        for template, count in self._sources.pool.sizes().items():
            ready.add_metric([template], count)
        yield ready
        yield from self._nodes()
        yield from self._pools()
        if self._sources.spool is not None:
            away, waiting = self._sources.spool.away, self._sources.spool.usage
            yield GaugeMetricFamily(
                "atoll_blobs_away", "1 while the blob store is unavailable.", away is not None
            )
            yield GaugeMetricFamily(
                "atoll_spool_objects",
                "Objects on this node that wait for the blob store.",
                waiting.objects,
            )
            yield GaugeMetricFamily(
                "atoll_spool_bytes",
                "Bytes on this node that wait for the blob store.",
                waiting.size,
            )

    def _nodes(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        by_status: Counter[tuple[str, bool]] = Counter()
        sessions = GaugeMetricFamily(
            "atoll_node_sessions", "Sessions with an instance, by node.", labels=["node"]
        )
        for node in self._sources.nodes.known:
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
            "Sessions that this process moved to another node, by cause.",
            labels=["cause"],
        )
        for cause, count in self._sources.migrations.moved.items():
            moved.add_metric([cause], count)
        yield moved

    def _pools(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        by = ["template"]
        target = GaugeMetricFamily(
            "atoll_pool_target", "Target number of ready instances, by template.", labels=by
        )
        start = GaugeMetricFamily(
            "atoll_pool_start_seconds",
            "Time that starting an instance takes, by template.",
            labels=by,
        )
        hits = CounterMetricFamily(
            "atoll_pool_hits", "Creates that got a ready instance, by template.", labels=by
        )
        misses = CounterMetricFamily(
            "atoll_pool_misses", "Creates that had to wait for a start, by template.", labels=by
        )
        for template, plan in self._sources.pool.plans.items():
            target.add_metric([template], plan.target)
            seconds = self._sources.pool.stats.start_seconds(template)
            if seconds is not None:
                start.add_metric([template], seconds)
            hit, missed = self._sources.pool.stats.counts(template)
            hits.add_metric([template], hit)
            misses.add_metric([template], missed)
        yield from (target, start, hits, misses)


def register(registry: CollectorRegistry, sources: MetricsSources) -> None:
    registry.register(_Collector(sources))
