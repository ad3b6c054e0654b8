"""The loops that run beside requests: reconcilers, sweeps and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.app import removed_data_directories
from atoll.reconcile.builds import BuildReconciler
from atoll.reconcile.checkpoints import CheckpointSweep
from atoll.reconcile.disruptions import DisruptionReconciler
from atoll.reconcile.drains import DrainReconciler
from atoll.reconcile.events import EventNumbering, EventSweep
from atoll.reconcile.executions import ExecutionAdoption
from atoll.reconcile.idempotency_keys import IdempotencyKeySweep
from atoll.reconcile.layers import LayerSweep
from atoll.reconcile.links import SessionLinks
from atoll.reconcile.moved_sessions import MovedSessions
from atoll.reconcile.node_report import NodeReport
from atoll.reconcile.nodes import NodeMonitor
from atoll.reconcile.orphaned_blobs import OrphanedBlobSweep
from atoll.reconcile.orphaned_instances import OrphanedInstanceSweep
from atoll.reconcile.packages import PackageSweep
from atoll.reconcile.pool import PoolRefill
from atoll.reconcile.sessions import SessionReconciler
from atoll.reconcile.sweep import on_notify
from atoll.reconcile.webhooks import WebhookReconciler
from atoll.service.events.service import TOPIC
from atoll.service.templates.service import CHANGED

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from atoll.app.backends import Backends
    from atoll.app.compute import ComputeGroup
    from atoll.app.executions import ExecutionGroup
    from atoll.app.nodes import NodeGroup
    from atoll.app.sessions import SessionGroup
    from atoll.service.webhooks.delivery import WebhookSender
    from atoll.settings import Settings

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaServices:
    """All services of a replica."""

    backends: Backends
    compute: ComputeGroup
    nodes: NodeGroup
    sessions: SessionGroup
    executions: ExecutionGroup
    webhook_sender: WebhookSender


class Loops:
    def __init__(self, groups: ReplicaServices) -> None:
        self._groups = groups
        backends, compute = groups.backends, groups.compute
        settings, replica = backends.settings, backends.replica
        executions = groups.executions
        self.adoption = ExecutionAdoption(
            replica,
            groups.sessions.access.records,
            executions.records,
            executions.runner,
            settings.coordination,
        )
        self._builds = BuildReconciler(replica, compute.builds, settings.template)
        moved = MovedSessions(
            replica, backends.driver, groups.sessions.access.connections, groups.executions.runner
        )
        self._report = NodeReport(
            replica, groups.nodes.nodes, moved, settings.node, compute.pool.sizes
        )
        compute.templates.subscribe(self._builds)
        compute.templates.subscribe(self._report)

    def all(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The loops by name, to be run as tasks."""
        backends, embedded = self._groups.backends, self._groups.backends.embedded
        loops = self._of_sessions() | self._of_storage() | self._of_events()
        if not embedded:
            loops |= self._of_servers()
        if backends.spool is not None:
            loops["spool"] = backends.spool.run()
        return loops

    def _of_sessions(self) -> dict[str, Coroutine[Any, Any, None]]:
        groups, backends, compute = self._groups, self._groups.backends, self._groups.compute
        settings, replica, driver = backends.settings, backends.replica, backends.driver
        store, coordination, clock = replica.store, replica.coordination, replica.clock
        reconciler = SessionReconciler(
            replica,
            groups.sessions.timers,
            groups.sessions.transitions,
            groups.sessions.observers,
            settings.session,
        )
        invalidate = compute.templates.invalidate
        orphans = OrphanedInstanceSweep(
            replica,
            driver,
            groups.sessions.transitions,
            compute.pool,
            settings.session,
            backends.cluster,
        )
        loops = {
            "execution adoption": self.adoption.run(),
            # They may have been changed by another replica.
            "template notifications": on_notify(
                "templates.outage", coordination, CHANGED, invalidate, on_error=invalidate
            ),
            "pool refill": PoolRefill(
                compute.pool, compute.instance_maker, store, driver, settings.pool, clock
            ).run(),
            "session reconciler": reconciler.run(),
            "orphaned instances": orphans.run(),
            "template builds": self._builds.run(),
            "layer sweep": LayerSweep(replica, driver, compute.builds, settings.template).run(),
            "automatic checkpoints": groups.sessions.autosave.run(
                groups.executions.runner.session_ids
            ),
            "node list": groups.nodes.peers.run(),
            "node report": self._report.run(),
        }
        if driver.disruptions is not None:
            loops["disruptions"] = DisruptionReconciler(
                replica, driver.disruptions, groups.sessions.disruptions, compute.pool
            ).run()
        if driver.packages is not None:
            loops["package sweep"] = PackageSweep(replica, driver.packages, settings.packages).run()
        return loops

    def _of_storage(self) -> dict[str, Coroutine[Any, Any, None]]:
        backends, checkpoints = self._groups.backends, self._groups.compute.checkpoints
        settings, replica, blobs = backends.settings, backends.replica, backends.blobs
        store, clock = replica.store, replica.clock
        orphaned_blobs = OrphanedBlobSweep(
            replica,
            blobs,
            checkpoints,
            cluster=backends.cluster,
            name=replica.node_id if backends.spool is None else "shared",
            request_ttl=settings.idempotency_ttl,
        )
        return {
            "idempotency key sweep": IdempotencyKeySweep(store, blobs, clock).run(),
            "checkpoint sweep": CheckpointSweep(store, checkpoints, clock).run(),
            "orphaned blobs": orphaned_blobs.run(),
        }

    def _of_events(self) -> dict[str, Coroutine[Any, Any, None]]:
        replica, feed = self._groups.backends.replica, self._groups.compute.feed
        store, coordination, clock = replica.store, replica.coordination, replica.clock
        settings = self._groups.backends.settings.event
        sender = self._groups.webhook_sender
        return {
            "event numbering": EventNumbering(feed).run(),
            "event notifications": on_notify("events.outage", coordination, TOPIC, feed.wake),
            "event sweep": EventSweep(store, clock, settings).run(),
            "webhooks": WebhookReconciler(replica, feed, sender, settings).run(),
        }

    def _of_servers(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Loops that an embedded Atoll does without: nothing outlives it, and it has one node."""
        groups, nodes = self._groups, self._groups.nodes
        settings, replica = groups.backends.settings, groups.backends.replica
        connections = groups.sessions.access.connections
        return {
            "session links": SessionLinks(replica, connections, settings.link).run(),
            "removed data directories": _remove_leftovers(settings),
            "node probes": NodeMonitor(
                replica, nodes.nodes, nodes.probe, nodes.migrations, settings.node
            ).run(),
            "node drains": DrainReconciler(
                replica,
                nodes.nodes,
                nodes.placement,
                nodes.migrations,
                groups.executions.runner,
                settings.node,
                groups.sessions.transitions.leave,
            ).run(),
        }


async def _remove_leftovers(settings: Settings) -> None:
    try:
        found = await removed_data_directories.collect(settings)
    except OSError as error:
        log.warning("leftovers.not_collected", error=str(error))
        return
    for leftover in found:
        if leftover.error is not None:
            log.warning(
                "leftovers.not_removed", data_dir=str(leftover.data_dir), error=leftover.error
            )
