"""The parts of a control plane put together for a test, on SQLite and memory, with nothing run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.blobs.objects import LocalObjects
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.service.approvals import Approvals
from atoll.service.attempts import Attempts
from atoll.service.builds import Builds
from atoll.service.bulk import Bulk
from atoll.service.contexts import Contexts
from atoll.service.ends import Ends
from atoll.service.executions import Executions
from atoll.service.leases import Leases
from atoll.service.lives import Lives
from atoll.service.packages import Packages
from atoll.service.pool import Pool
from atoll.service.provision import Provision
from atoll.service.runs import Runs
from atoll.service.sealing import Sealing
from atoll.service.secrets import Secrets
from atoll.service.sessions import Sessions
from atoll.service.tasks import Tasks
from atoll.service.templates import Templates
from atoll.service.volumes import Volumes
from atoll.settings import Settings
from atoll.stores.recall import RecallingStore
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination

ME = "replica-me"
NODE = "local"


@dataclass
class Parts:
    settings: Settings
    store: RecallingStore
    coordination: Coordination
    leases: Leases
    runs: Runs
    executions: Executions
    lives: Lives
    templates: Templates
    builds: Builds


@asynccontextmanager
async def parts(
    place: Path, clock: Clock, driver: LocalDriver | None = None
) -> AsyncIterator[Parts]:
    settings, tasks = Settings(data_dir=place), Tasks()
    url = f"sqlite:///{place / 'atoll.db'}"
    store = RecallingStore(
        SqlStore([url], sqlite=settings.sqlite, database=settings.database), clock, settings.recall
    )
    coordination = MemoryCoordination(ME, settings.coordination, timedelta(hours=1), clock)
    driver = driver or LocalDriver(place, settings.local, settings.link)
    leases = Leases(coordination, clock, settings.coordination)
    pool = Pool(store, driver, clock, NODE, ME, ephemeral=False, settings=settings.pool)
    templates = Templates(store, driver, coordination, clock, settings)
    lives = Lives(store, driver, pool, templates, leases, tasks, clock, settings.session, NODE)
    blobs = LocalObjects(place / "blobs")
    packages = Packages(driver, leases, clock, settings.packages, "secret", NODE)
    provision = Provision(
        Secrets(Sealing()), Volumes(store, driver, blobs, clock, settings.session, NODE), packages
    )
    sessions = Sessions(
        store, driver, pool, templates, lives, leases, tasks, clock, settings, NODE, provision
    )
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
        store, driver, templates, packages, leases, tasks, blobs, clock, settings.template, NODE
    )
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
    await store.open()
    await coordination.open()
    await leases.start()
    try:
        yield Parts(
            settings, store, coordination, leases, runs, executions, lives, templates, builds
        )
    finally:
        await coordination.close()
        await store.close()
