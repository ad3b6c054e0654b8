"""Opens the back-ends that the settings name: store, coordination, blobs and driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.app import data_directory
from atoll.app.stores import names_database, open_store
from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.shared.volumes.bucket_mounts import Bucket
from atoll.errors import TemporaryError
from atoll.service.auth.encryption import Encryption
from atoll.service.background import BackgroundTasks
from atoll.service.executions.records import RELEASED
from atoll.service.replica import Replica
from atoll.stores.stale_cache import CachingStore

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.drivers.base import Driver
    from atoll.settings import BlobSettings, Settings

log = structlog.get_logger(__name__)

SECRET_KEY_FILE = "secret-key"  # noqa: S105 - the name of a file
SPOOLED_PREFIXES = ("executions/", "workspaces/", "requests/")
"""Blobs beneath these are spooled while S3 is unavailable: clients rely on them."""


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
    node_id = await find_node_id(settings, own=own)
    coordination = _coordination(settings, cluster, clock)
    stack.push_async_callback(coordination.close)
    await coordination.open()
    stack.push_async_callback(_announce_departure, coordination)
    leases = Leases(coordination, clock, settings.coordination)
    await leases.start()
    heartbeat = asyncio.create_task(leases.run(), name="heartbeat")
    stack.push_async_callback(_cancel, heartbeat)
    secret = await store.secret()
    blobs = open_blobs(settings, clock)
    driver = _driver(settings, cluster, secret, blobs)
    stack.push_async_callback(driver.close)
    await driver.open()
    return Backends(
        settings,
        Replica(node_id, store, coordination, leases, BackgroundTasks(), clock),
        driver,
        blobs,
        _encryption(settings, own=own),
        cluster,
        secret,
        embedded,
    )


async def find_node_id(settings: Settings, *, own: bool) -> str:
    """The node of this replica: its data directory, or a cluster, which replicas share."""
    if settings.driver == "kubernetes":
        return settings.kubernetes.node
    return await asyncio.to_thread(data_directory.node_id, settings.data_dir, own=own)


def _coordination(settings: Settings, cluster: str, clock: Clock) -> Coordination:
    replica, ttl = ids.replica_id(), settings.execution.max_timeout
    if settings.redis_url is not None:
        # Only here: a server without Redis does not load its client.
        from atoll.coordination.redis import RedisCoordination

        prefix = {"prefix": f"{settings.coordination.prefix}.{cluster}"}
        own = settings.coordination.model_copy(update=prefix)
        return RedisCoordination(replica, settings.redis_url, own, ttl)
    return MemoryCoordination(replica, settings.coordination, ttl, clock)


def open_blobs(settings: Settings, clock: Clock) -> LocalBlobs | Spool:
    """Connects with the first call."""
    if settings.blob.url is None:
        return LocalBlobs(settings.data_dir / "blobs")
    spool = settings.data_dir / "spool"
    return Spool(S3Blobs(settings.blob), spool, settings.blob, clock, prefixes=SPOOLED_PREFIXES)


def _driver(settings: Settings, cluster: str, secret: str, blobs: Blobs) -> Driver:
    bucket = _bucket(settings.blob)
    if settings.driver == "docker":
        # Imported here, because the Docker client takes time to import.
        from atoll.drivers.docker.driver import DockerDriver

        return DockerDriver(
            settings.data_dir, settings.docker, settings.link, settings.local, bucket
        )
    if settings.driver == "kubernetes":
        from atoll.drivers.kubernetes.bucket_volumes import BucketDirectory
        from atoll.drivers.kubernetes.driver import KubernetesDriver

        return KubernetesDriver(
            settings.kubernetes,
            settings.link,
            settings.local,
            cluster=cluster,
            secret=secret,
            bucket=None if bucket is None else BucketDirectory(bucket.prefix, blobs),
        )
    return LocalDriver(
        settings.data_dir, settings.local, settings.link, bucket, packages=settings.packages
    )


def _bucket(settings: BlobSettings) -> Bucket | None:
    """The bucket as the node mounts it; none when blobs are on its disk."""
    if settings.url is None:
        return None
    name, prefix = settings.bucket_and_prefix
    region = settings.region or os.environ.get("AWS_REGION") or "us-east-1"
    path_style = settings.path_style
    given = {
        field: None if secret is None else secret.get_secret_value()
        for field, secret in (
            ("access_key_id", settings.access_key_id),
            ("secret_access_key", settings.secret_access_key),
            ("proxy_url", settings.proxy_url),
        )
    }
    return Bucket(
        name=name,
        prefix=prefix,
        endpoint=settings.endpoint or f"https://s3.{region}.amazonaws.com",
        path_style=settings.endpoint is not None if path_style is None else path_style,
        connect_timeout=settings.connect_timeout,
        timeout=settings.timeout,
        region=region,
        encryption=settings.encryption,
        kms_key_id=settings.kms_key_id,
        ca_file=settings.ca_file,
        **given,
    )


async def _announce_departure(coordination: Coordination) -> None:
    """
    Notify other replicas that this one is shutting down, so that they take over its executions at
    once.
    """
    await coordination.shutdown()
    try:
        await coordination.notify(RELEASED)
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
