"""Opens the back-ends that the settings name: store, coordination, blobs and driver."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.app import data_directory
from atoll.app.drivers import open_driver
from atoll.app.stores import names_database, open_store
from atoll.blobs.select import select_blobs
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import TemporaryError
from atoll.service.auth.encryption import Encryption
from atoll.service.background import BackgroundTasks
from atoll.service.executions.runner import REPLICA_LEFT
from atoll.service.replica import Replica
from atoll.stores.stale_cache import CachingStore

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.drivers.base import Driver
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

SECRET_KEY_FILE = "secret-key"  # noqa: S105 - the name of a file


@dataclass(frozen=True)
class Backends:
    """What services are built on."""

    settings: Settings
    replica: Replica
    driver: Driver
    blobs: Blobs
    encryption: Encryption
    cluster: str
    """Identifies the database: replicas with the same one belong together."""
    secret: str
    """Key of signed tokens, shared by all replicas."""
    embedded: bool = False

    @property
    def spool(self) -> Spool | None:
        """The blob store, if it is a remote one that may be unavailable."""
        return self.blobs if isinstance(self.blobs, Spool) else None


async def open_backends(settings: Settings, stack: AsyncExitStack, *, embedded: bool) -> Backends:
    clock = SystemClock()
    store = CachingStore(open_store(settings), clock, settings.recall)
    stack.push_async_callback(store.close)
    await store.open()
    own = embedded or not names_database(settings)
    cluster = await store.cluster()
    if not embedded:
        await asyncio.to_thread(data_directory.assign_to, settings.data_dir, cluster, own=own)
    node_id = await asyncio.to_thread(data_directory.node_id, settings.data_dir, own=own)
    coordination = _coordination(settings, cluster, clock)
    stack.push_async_callback(coordination.close)
    await coordination.open()
    stack.push_async_callback(_announce_departure, coordination)
    leases = Leases(coordination, clock, settings.coordination)
    await leases.start()
    heartbeat = asyncio.create_task(leases.run(), name="heartbeat")
    stack.push_async_callback(_cancel, heartbeat)
    driver = open_driver(settings)
    stack.push_async_callback(driver.close)
    await driver.open()
    return Backends(
        settings,
        Replica(node_id, store, coordination, leases, BackgroundTasks(), clock),
        driver,
        select_blobs(settings, clock),
        _encryption(settings, own=own),
        cluster,
        await store.secret(),
        embedded,
    )


def _coordination(settings: Settings, cluster: str, clock: Clock) -> Coordination:
    replica, ttl = ids.replica_id(), settings.execution.max_timeout
    if settings.redis_url is not None:
        # Only here: a server without Redis does not load its client.
        from atoll.coordination.redis import RedisCoordination

        prefix = {"prefix": f"{settings.coordination.prefix}.{cluster}"}
        own = settings.coordination.model_copy(update=prefix)
        return RedisCoordination(replica, settings.redis_url, own, ttl)
    return MemoryCoordination(replica, settings.coordination, ttl, clock)


async def _announce_departure(coordination: Coordination) -> None:
    """
    Notify other replicas that this one is shutting down, so that they take over its executions at
    once.
    """
    await coordination.shutdown()
    try:
        await coordination.notify(REPLICA_LEFT)
    except TemporaryError as error:
        log.info("replica.departure_not_announced", error=error.message)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _encryption(settings: Settings, *, own: bool) -> Encryption:
    """The key file is only for a database beside it: other servers do not have the file."""
    keys = [settings.secrets.key, *settings.secrets.old_keys]
    given = [key.get_secret_value() for key in keys if key is not None]
    return Encryption(given, settings.data_dir / SECRET_KEY_FILE if own else None)
