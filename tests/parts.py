"""The parts of a control plane put together for a test, on SQLite and memory, with nothing run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.blobs.objects import LocalObjects
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.reconcile.executions import Adoption
from atoll.reconcile.orphans import Orphans
from atoll.reconcile.recovery import Recovery
from atoll.reconcile.sessions import SessionReconciler
from atoll.service.auth.encryption import Encryption
from atoll.service.background import BackgroundTasks
from atoll.service.checkpoints.service import Checkpoints
from atoll.service.contexts.service import Contexts
from atoll.service.events.service import Feed
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.attempt import Attempts
from atoll.service.executions.completion import Completions
from atoll.service.executions.offload import Offload
from atoll.service.executions.runner import Runner
from atoll.service.executions.service import Executions
from atoll.service.packages.service import Packages
from atoll.service.pool.service import Pool
from atoll.service.replica import Replica
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.autosave import Autosave
from atoll.service.sessions.clone import Clones
from atoll.service.sessions.connections import Connections
from atoll.service.sessions.lifecycle import Lifecycle
from atoll.service.sessions.provisioning import Provisioning
from atoll.service.sessions.secrets import Secrets
from atoll.service.sessions.service import Sessions
from atoll.service.sessions.transitions import Transitions
from atoll.service.templates.build_inputs import BuildInputs
from atoll.service.templates.build_logs import BuildLogs
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.service.volumes.service import Volumes
from atoll.settings import Settings
from atoll.stores.recall import RecallingStore
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.template import Template

ME = "replica-me"
NODE = "local"


@dataclass
class Parts:
    replica: Replica
    settings: Settings
    store: RecallingStore
    driver: LocalDriver
    coordination: MemoryCoordination
    leases: Leases
    background: BackgroundTasks
    templates: Templates
    connections: Connections
    sessions: Sessions
    lifecycle: Lifecycle
    transitions: Transitions
    clones: Clones
    autosave: Autosave
    activity: Activity
    runner: Runner
    executions: Executions
    builds: Builds
    recovery: Recovery
    adoption: Adoption
    reconciler: SessionReconciler
    sweep: Callable[[str], Orphans]
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
    recalling = RecallingStore(store, clock, settings.recall)
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
    """Every template can be used as it is."""

    async def provide(self, template: Template) -> None:
        pass


def put_together(
    place: Path,
    clock: Clock,
    *,
    settings: Settings | None = None,
    driver: LocalDriver | None = None,
    coordination: MemoryCoordination | None = None,
    leases_clock: Clock | None = None,
) -> Parts:
    """Neither opened nor run."""
    settings, background = settings or Settings(data_dir=place), BackgroundTasks()
    url = f"sqlite:///{place / 'atoll.db'}"
    store = RecallingStore(
        SqlStore([url], sqlite=settings.sqlite, database=settings.database), clock, settings.recall
    )
    if coordination is None:
        coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    driver = driver or LocalDriver(place, settings.local, settings.link)
    leases = Leases(coordination, leases_clock or clock, settings.coordination)
    blobs = LocalObjects(place / "blobs")
    replica = Replica(NODE, store, coordination, leases, background, clock)
    templates = templates_on(replica, driver, blobs, settings)
    packages = Packages(driver, leases, clock, settings.packages, "secret", NODE)
    builds = Builds(replica, driver, templates, packages, settings.template)
    pool = Pool(replica, driver, builds)
    volumes = Volumes(store, driver, blobs, clock, settings.session, NODE)
    checkpoints = Checkpoints(replica, blobs, volumes)
    connections = Connections(
        store,
        driver,
        pool,
        templates,
        leases,
        background,
        clock,
        settings.session,
        NODE,
        checkpoints,
    )
    secrets = Secrets(Encryption())
    provisioning = Provisioning(secrets, volumes, packages)
    sessions = Sessions(
        store,
        driver,
        pool,
        templates,
        connections,
        leases,
        background,
        clock,
        settings,
        NODE,
        provisioning,
    )
    transitions = Transitions(
        store,
        driver,
        pool,
        connections,
        sessions,
        checkpoints,
        leases,
        clock,
        settings.session,
        settings.archive,
        NODE,
        remote=False,
    )
    lifecycle = Lifecycle(
        store, driver, templates, connections, sessions, background, clock, settings, NODE
    )
    sessions.settle = transitions.settle
    activity = Activity(store, background, clock)
    connections.touched = activity.touch
    activity.moved = lifecycle.schedule
    offload = Offload(blobs)
    completions = Completions(store, offload, coordination, clock)
    attempts = Attempts(
        store,
        driver,
        connections,
        offload,
        leases,
        provisioning,
        clock,
        settings.execution,
        settings.link,
    )
    approvals = Approvals(coordination, connections, background)
    runner = Runner(
        store,
        sessions,
        connections,
        offload,
        attempts,
        completions,
        coordination,
        leases,
        approvals,
        background,
        clock,
        settings.execution,
        NODE,
    )
    autosave = Autosave(
        checkpoints, store, driver, connections, background, clock, settings.workspace, remote=False
    )
    sessions.autosave = autosave
    autosave.resting = transitions.save_resting
    autosave.busy = runner.sessions
    runner.saved = autosave.before_result
    executions = Executions(
        store,
        connections,
        runner,
        completions,
        offload,
        coordination,
        leases,
        approvals,
        Contexts(connections, driver, provisioning),
        background,
        clock,
        settings,
    )
    return Parts(
        replica=replica,
        settings=settings,
        store=store,
        driver=driver,
        coordination=coordination,
        leases=leases,
        background=background,
        templates=templates,
        connections=connections,
        sessions=sessions,
        lifecycle=lifecycle,
        transitions=transitions,
        clones=Clones(
            store, driver, connections, sessions, lifecycle, autosave, secrets, leases, clock, NODE
        ),
        autosave=autosave,
        activity=activity,
        runner=runner,
        executions=executions,
        builds=builds,
        recovery=Recovery(store, driver, sessions, pool, settings.pool, NODE),
        adoption=Adoption(store, coordination, leases, runner, clock, settings.coordination),
        reconciler=SessionReconciler(
            store, lifecycle, transitions, coordination, clock, settings.session, NODE
        ),
        sweep=partial(
            Orphans, store, driver, sessions, pool, coordination, leases, clock, settings.session,
            NODE,
        ),
    )  # fmt: skip


@asynccontextmanager
async def parts(
    place: Path, clock: Clock, driver: LocalDriver | None = None
) -> AsyncIterator[Parts]:
    found = put_together(place, clock, driver=driver)
    await found.open()
    try:
        yield found
    finally:
        await found.close()
