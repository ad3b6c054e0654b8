"""The parts of a control plane put together for a test, on SQLite and memory, with nothing run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from atoll.blobs.objects import LocalObjects
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.reconcile.executions import Adoption
from atoll.reconcile.orphans import Orphans
from atoll.reconcile.recovery import Recovery
from atoll.reconcile.sessions import SessionReconciler
from atoll.service.auth.encryption import Sealing
from atoll.service.background import Tasks
from atoll.service.sessions.autosave import Saves
from atoll.service.checkpoints.service import Checkpoints
from atoll.service.contexts.service import Contexts
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.attempt import Attempts
from atoll.service.executions.completion import Ends
from atoll.service.executions.offload import Bulk
from atoll.service.executions.runner import Runs
from atoll.service.executions.service import Executions
from atoll.service.packages.service import Packages
from atoll.service.pool.service import Pool
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.clone import Clones
from atoll.service.sessions.connections import Lives
from atoll.service.sessions.lifecycle import Wants
from atoll.service.sessions.provisioning import Provision
from atoll.service.sessions.secrets import Secrets
from atoll.service.sessions.service import Sessions
from atoll.service.sessions.transitions import Steps
from atoll.service.templates.build_inputs import Materials
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.service.volumes.service import Volumes
from atoll.settings import Settings
from atoll.stores.recall import RecallingStore
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from atoll.clock import Clock

ME = "replica-me"
NODE = "local"


@dataclass
class Parts:
    settings: Settings
    store: RecallingStore
    driver: LocalDriver
    coordination: MemoryCoordination
    leases: Leases
    tasks: Tasks
    templates: Templates
    lives: Lives
    sessions: Sessions
    wants: Wants
    steps: Steps
    clones: Clones
    saves: Saves
    activity: Activity
    runs: Runs
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
    settings, tasks = settings or Settings(data_dir=place), Tasks()
    url = f"sqlite:///{place / 'atoll.db'}"
    store = RecallingStore(
        SqlStore([url], sqlite=settings.sqlite, database=settings.database), clock, settings.recall
    )
    if coordination is None:
        coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    driver = driver or LocalDriver(place, settings.local, settings.link)
    leases = Leases(coordination, leases_clock or clock, settings.coordination)
    pool = Pool(store, driver, clock, NODE, leases.replica, ephemeral=False, settings=settings.pool)
    blobs = LocalObjects(place / "blobs")
    materials = Materials(blobs, Sealing())
    templates = Templates(store, driver, materials, coordination, clock, settings)
    checkpoints = Checkpoints(store, blobs, leases, clock, NODE)
    lives = Lives(
        store, driver, pool, templates, leases, tasks, clock, settings.session, NODE, checkpoints
    )
    packages = Packages(driver, leases, clock, settings.packages, "secret", NODE)
    secrets = Secrets(Sealing())
    volumes = Volumes(store, driver, blobs, clock, settings.session, NODE)
    provision = Provision(secrets, volumes, packages)
    sessions = Sessions(
        store, driver, pool, templates, lives, leases, tasks, clock, settings, NODE, provision
    )
    steps = Steps(
        store,
        driver,
        pool,
        lives,
        sessions,
        checkpoints,
        leases,
        clock,
        settings.session,
        settings.archive,
        NODE,
        remote=False,
    )
    wants = Wants(store, driver, templates, lives, sessions, tasks, clock, settings, NODE)
    sessions.settle = steps.settle
    activity = Activity(store, tasks, clock)
    lives.touched = activity.touch
    activity.moved = wants.schedule
    bulk = Bulk(blobs, settings.blob)
    ends = Ends(store, bulk, coordination, clock)
    attempts = Attempts(
        store, driver, lives, bulk, leases, provision, clock, settings.execution, settings.link
    )
    approvals = Approvals(coordination, lives, tasks)
    runs = Runs(
        store,
        sessions,
        lives,
        bulk,
        attempts,
        ends,
        coordination,
        leases,
        approvals,
        tasks,
        clock,
        settings.execution,
        NODE,
    )
    builds = Builds(
        store, driver, templates, packages, materials, leases, tasks, blobs, clock,
        settings.template, NODE,
    )  # fmt: skip
    saves = Saves(checkpoints, store, driver, lives, tasks, clock, settings.workspace, remote=False)
    sessions.saves = saves
    saves.resting = steps.save_resting
    saves.busy = runs.sessions
    runs.saved = saves.before_result
    executions = Executions(
        store,
        lives,
        runs,
        ends,
        bulk,
        coordination,
        leases,
        approvals,
        Contexts(lives, driver, provision, settings.execution),
        tasks,
        clock,
        settings,
    )
    return Parts(
        settings=settings,
        store=store,
        driver=driver,
        coordination=coordination,
        leases=leases,
        tasks=tasks,
        templates=templates,
        lives=lives,
        sessions=sessions,
        wants=wants,
        steps=steps,
        clones=Clones(store, driver, lives, sessions, wants, saves, secrets, leases, clock, NODE),
        saves=saves,
        activity=activity,
        runs=runs,
        executions=executions,
        builds=builds,
        recovery=Recovery(store, driver, sessions, pool, settings.pool, NODE),
        adoption=Adoption(store, coordination, leases, runs, clock, settings.coordination),
        reconciler=SessionReconciler(
            store, wants, steps, coordination, clock, settings.session, NODE
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
