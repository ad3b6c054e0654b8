"""A replica that the composition root builds for a test, on SQLite and memory; nothing runs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.app.backends import Backends
from atoll.app.compute import compute_group
from atoll.app.executions import execution_group
from atoll.app.nodes import node_group
from atoll.app.sessions import session_core, session_group
from atoll.blobs.base import Blobs
from atoll.blobs.local import LocalBlobs
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.base import Driver
from atoll.drivers.local.driver import LocalDriver
from atoll.model.template import Template
from atoll.reconcile.executions import ExecutionAdoption
from atoll.reconcile.orphaned_instances import OrphanedInstanceSweep
from atoll.reconcile.recovery import Recovery
from atoll.reconcile.sessions import SessionReconciler
from atoll.service.auth.encryption import Encryption
from atoll.service.background import BackgroundTasks
from atoll.service.checkpoints.service import Checkpoints
from atoll.service.events.service import Feed
from atoll.service.executions.commit import ResultCommit
from atoll.service.executions.records import ExecutionRecords
from atoll.service.executions.runner import Runner
from atoll.service.executions.service import Executions
from atoll.service.pool.service import Pool
from atoll.service.replica import Replica
from atoll.service.sessions.access import SessionAccess
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.autosave import Autosave
from atoll.service.sessions.checkpoint_requests import CheckpointRequests
from atoll.service.sessions.connections import Connections
from atoll.service.sessions.records import SessionRecords
from atoll.service.sessions.service import Sessions
from atoll.service.sessions.start import SessionStarter
from atoll.service.sessions.timers import SessionTimers
from atoll.service.sessions.transitions import Transitions
from atoll.service.templates.build_inputs import BuildInputs
from atoll.service.templates.build_logs import BuildLogs
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.service.volumes.service import Volumes
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from atoll.stores.stale_cache import CachingStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.service.checkpoints.service import Checkpoints

ME = "replica-me"
NODE = "local"


@dataclass
class Parts:
    settings: Settings
    backends: Backends
    replica: Replica
    store: CachingStore
    driver: Driver
    coordination: MemoryCoordination
    leases: Leases
    background: BackgroundTasks
    templates: Templates
    pool: Pool
    checkpoints: Checkpoints
    access: SessionAccess
    records: SessionRecords
    connections: Connections
    starter: SessionStarter
    sessions: Sessions
    transitions: Transitions
    timers: SessionTimers
    autosave: Autosave
    checkpoint_requests: CheckpointRequests
    activity: Activity
    execution_records: ExecutionRecords
    runner: Runner
    commit: ResultCommit
    executions: Executions
    builds: Builds
    recovery: Recovery
    adoption: ExecutionAdoption
    reconciler: SessionReconciler
    sweep: Callable[[str], OrphanedInstanceSweep]
    """The sweep of orphans, given what the database is known by."""

    async def open(self) -> None:
        await self.store.open()
        await self.coordination.open()
        await self.leases.start()

    async def close(self) -> None:
        await self.coordination.close()
        await self.store.close()


def replica_on(
    store: SqlStore,
    leases: Leases,
    clock: Clock,
    node_id: str = NODE,
    coordination: MemoryCoordination | None = None,
) -> Replica:
    """A replica whose store is wrapped, for a test that has its own."""
    settings = Settings()
    recalling = CachingStore(store, clock, settings.recall)
    if coordination is None:
        coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    return Replica(node_id, recalling, coordination, leases, BackgroundTasks(), clock)


def templates_on(replica: Replica, driver: Driver, blobs: Blobs, settings: Settings) -> Templates:
    feed = Feed(replica.store, replica.coordination, replica.clock)
    return Templates(
        replica, driver, BuildInputs(blobs, Encryption()), BuildLogs(blobs), feed, settings
    )


def checkpoints_on(
    store: SqlStore,
    blobs: Blobs,
    leases: Leases,
    clock: Clock,
    node_id: str = NODE,
    *,
    backups: int = 2,
) -> Checkpoints:
    """Those of a node without mounted workspaces."""
    settings = Settings()
    driver = LocalDriver(Path("/nonexistent"), settings.local, settings.link)
    volumes = Volumes(store, driver, blobs, clock, settings.session, node_id)
    return Checkpoints(replica_on(store, leases, clock, node_id), blobs, volumes, backups=backups)


class NothingToBuild:
    """Every template is accepted without a build."""

    async def provide(self, template: Template) -> None:
        pass


def put_together(
    place: Path,
    clock: Clock,
    *,
    settings: Settings | None = None,
    driver: Driver | None = None,
    coordination: MemoryCoordination | None = None,
    leases_clock: Clock | None = None,
    store: CachingStore | None = None,
) -> Parts:
    """Neither opened nor run."""
    settings = settings or Settings(data_dir=place)
    if store is None:
        sql = SqlStore(
            [f"sqlite:///{place / 'atoll.db'}"], sqlite=settings.sqlite, database=settings.database
        )
        store = CachingStore(sql, clock, settings.recall)
    if coordination is None:
        coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    leases = Leases(coordination, leases_clock or clock, settings.coordination)
    replica = Replica(NODE, store, coordination, leases, BackgroundTasks(), clock)
    backends = Backends(
        settings,
        replica,
        driver or LocalDriver(place, settings.local, settings.link),
        LocalBlobs(place / "blobs"),
        Encryption(),
        cluster="cluster",
        secret="secret",
    )
    compute = compute_group(backends)
    core = session_core(backends, compute)
    nodes = node_group(backends, compute, core, url=None)
    sessions = session_group(backends, compute, core, nodes.remote_checkpoints)
    executions = execution_group(backends, sessions)
    return Parts(
        settings=settings,
        backends=backends,
        replica=replica,
        store=store,
        driver=backends.driver,
        coordination=coordination,
        leases=leases,
        background=replica.background,
        templates=compute.templates,
        pool=compute.pool,
        checkpoints=compute.checkpoints,
        access=sessions.access,
        records=sessions.access.records,
        connections=sessions.access.connections,
        starter=sessions.access.starter,
        sessions=sessions.service,
        transitions=sessions.transitions,
        timers=sessions.timers,
        autosave=sessions.autosave,
        checkpoint_requests=sessions.checkpoint_requests,
        activity=sessions.activity,
        execution_records=executions.records,
        runner=executions.runner,
        commit=executions.commit,
        executions=executions.service,
        builds=compute.builds,
        recovery=Recovery(replica, backends.driver, sessions.timers, compute.pool, settings.pool),
        adoption=ExecutionAdoption(
            replica,
            sessions.access.records,
            executions.records,
            executions.runner,
            settings.coordination,
        ),
        reconciler=SessionReconciler(
            replica, sessions.timers, sessions.transitions, sessions.observers, settings.session
        ),
        sweep=partial(
            OrphanedInstanceSweep,
            replica,
            backends.driver,
            sessions.transitions,
            compute.pool,
            settings.session,
        ),
    )


@asynccontextmanager
async def parts(place: Path, clock: Clock, driver: Driver | None = None) -> AsyncIterator[Parts]:
    found = put_together(place, clock, driver=driver)
    await found.open()
    try:
        yield found
    finally:
        await found.close()
