"""
Volumes of a node, on its disk or in the bucket, and workspaces in the bucket: how they are made,
attached to instances and removed. `mounts` does the mounting.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from atoll.drivers.shared.cgroups import node_groups
from atoll.drivers.shared.volumes.bucket_mounts import PROCESSES, BucketMounts
from atoll.drivers.shared.volumes.mounts import Mount, NodeMounts
from atoll.drivers.shared.volumes.volume_disks import VolumeDisks
from atoll.drivers.shared.workspace_files import BUCKET
from atoll.errors import Conflict, InvalidRequest, NodeFull, TemporaryError
from atoll.model.resources import Resources
from atoll.model.volume import S3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.drivers.shared.workspace_files import Workspace
    from atoll.model.instance import InstanceSpec
    from atoll.model.volume import Volume
    from atoll.settings import LocalSettings

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
BUCKET_THREADS = 8
"""Threads for calls that may wait for S3, apart from the default thread pool."""

MOUNT_TIMEOUT = 20.0
"""Seconds within which a mount must come up, or answer."""
MOUNT_CPU = 1.0
"""Cores that the s3fs of one mount may use."""


class NodeVolumes:
    def __init__(
        self, node: Path, instances: Path, settings: LocalSettings, bucket: Bucket | None
    ) -> None:
        self._node = node
        self._settings = settings
        limits = Resources(
            cpu=MOUNT_CPU,
            memory=settings.mount_memory,
            disk=settings.mount_scratch,
            max_processes=PROCESSES,
        )
        self._buckets = BucketMounts(settings.s3fs, node, bucket, limits)
        self._no_images: str | None = None
        self.mounts = node / "mounts"
        """The directory that all mounts are in."""
        self._mounts = NodeMounts(
            self.mounts, instances, self._buckets, timedelta(seconds=MOUNT_TIMEOUT)
        )
        self._threads = ThreadPoolExecutor(BUCKET_THREADS, thread_name_prefix="bucket")
        self._ends = ThreadPoolExecutor(BUCKET_THREADS, thread_name_prefix="bucket end")

    def open(self, *, no_images: str | None) -> None:
        """`no_images` is why there are no file system images, if so."""
        self._no_images = no_images
        self._buckets.open(node_groups(self._settings, self._node))
        self._mounts.open(self._settings.mount_scratch if no_images is None else None)
        self._volumes = VolumeDisks(self._node / "volumes", images=no_images is None)
        self._volumes.open()

    def close(self) -> None:
        self._buckets.close()

    # Mounts of an instance; blocking, except `run` and `end`

    def attach(
        self, spec: InstanceSpec, workspace: Workspace, own: Sequence[Mount] = (), *, views: bool
    ) -> None:
        """
        Mount what the instance needs; its directory must exist. `own` are mounts for this instance
        alone. With `views`, read-only volumes get separate read-only mounts.
        """
        mounts = [
            mount for volume, _ in spec.volumes if (mount := self._mount_of(volume)) is not None
        ]
        if workspace.kind == BUCKET:
            name = _workspace_mount(workspace)
            mounts.append(Mount(name, prefix=workspace.prefix, uid=workspace.uid))
        mounts += own
        if views:
            mounts += [
                Mount(_view_mount(volume), view=self.source(volume))
                for volume, mount in spec.volumes
                if mount.read_only
            ]
        if mounts:
            self._mounts.note(spec.instance_id, [mount.name for mount in mounts])
            for mount in mounts:
                self._mounts.ensure(mount)

    def uses_bucket(self, spec: InstanceSpec) -> bool:
        """Whether an instance of this kind has mounts of the bucket."""
        return spec.prefix is not None or any(volume.kind == S3 for volume, _ in spec.volumes)

    def has_bucket_mounts(self, instance_id: str) -> bool:
        """
        Whether an existing instance has mounts of the bucket. While S3 does not answer, its
        processes cannot end and its mounts cannot be removed.
        """
        return any(self._mounts.is_of_bucket(name) for name in self._mounts.noted(instance_id))

    async def run(self, uses_bucket: bool, work: Callable[..., Result], *arguments: Any) -> Result:
        """
        Call `work` in a thread. Calls that use the bucket have threads of their own: while S3 does
        not answer, other calls do not wait.
        """
        if not uses_bucket:
            return await asyncio.to_thread(work, *arguments)
        return await _in(self._threads, work, *arguments)

    async def end(self, instance_id: str, kill: Callable[..., None], *arguments: Any) -> None:
        """Kill an instance in a thread that does not wait for mounts of other instances."""
        if not self.has_bucket_mounts(instance_id):
            await asyncio.to_thread(kill, *arguments)
            return
        await _in(self._ends, kill, *arguments)

    @contextlib.contextmanager
    def detached(self, instance_id: str) -> Iterator[None]:
        """The instance's directory is removed in this block, and its unused mounts after it."""
        had = self._mounts.noted(instance_id)
        yield
        # In reverse: a view, which was mounted last, keeps its volume busy.
        self._mounts.release(reversed(had))

    def source(self, volume: Volume) -> Path:
        """The directory to bind for a volume."""
        if self._mount_of(volume) is not None:
            return self._mounts.path(_volume_mount(volume))
        return self._volumes.directory(volume.id)

    def view(self, volume: Volume) -> Path:
        """The read-only directory of a volume that was attached with `views`."""
        return self._mounts.path(_view_mount(volume))

    def path(self, name: str) -> Path:
        """Where the mount of this name is."""
        return self._mounts.path(name)

    def sync(self, mount: Mount) -> None:
        """Flush a file system to disk, whichever mount namespace it is mounted in."""
        self._mounts.sync(mount)

    def files(self, workspace: Workspace) -> Path | None:
        """The mounted directory of a workspace in the bucket; None for one on the node's disk."""
        return self._mounts.path(_workspace_mount(workspace)) if workspace.kind == BUCKET else None

    def make_prefix(self, prefix: str) -> None:
        self._mounts.make_prefix(prefix)

    def _mount_of(self, volume: Volume) -> Mount | None:
        """None if the volume is a directory, which needs no mount."""
        if volume.kind == S3:
            return Mount(_volume_mount(volume), prefix=_prefix(volume))
        image = self._volumes.image(volume.id)
        return None if image is None else Mount(_volume_mount(volume), image=image)

    # Volumes

    def bucket_problem(self) -> str | None:
        return self._buckets.problem()

    async def make(self, volume: Volume) -> None:
        with _volume_errors(volume.id):
            if volume.kind == S3:
                await self.discard(_prefix(volume))
                await self.run(True, self._mounts.make_prefix, _prefix(volume))
            else:
                await asyncio.to_thread(self._volumes.make, volume.id, volume.size)

    async def check(self, volume: Volume, *, read_only: bool) -> None:
        if volume.kind == S3:
            self._check_bucket(f"Volume {volume.id}, which is in the bucket,")
        elif not read_only and await asyncio.to_thread(self._volumes.image, volume.id) is None:
            raise InvalidRequest(
                f"Volume {volume.id} can only be used read-only on this node: its size cannot be "
                f"limited ({self._no_images or 'it was made without an image'}).",
                code="isolation_unavailable",
            )

    async def check_unused(self, volume: Volume) -> None:
        if await asyncio.to_thread(self._mounts.in_use, _volume_mount(volume)):
            raise Conflict(f"Volume {volume.id} is in use by an instance.", code="volume_in_use")

    async def remove(self, volume: Volume) -> None:
        await self.check_unused(volume)
        with _volume_errors(volume.id):
            names = [_view_mount(volume), _volume_mount(volume)]
            await self.run(volume.kind == S3, self._mounts.release, names)
            if volume.kind == S3:
                await self.discard(_prefix(volume))
            else:
                await asyncio.to_thread(self._volumes.remove, volume.id)

    async def broken(self) -> list[str]:
        return await asyncio.to_thread(self._mounts.broken)

    async def discard(self, prefix: str) -> None:
        self._check_bucket("What is in the bucket")
        with _volume_errors(prefix):
            await self.run(True, self._mounts.remove_prefix, prefix)

    def _check_bucket(self, what: str) -> None:
        problem = self._buckets.problem()
        if problem is not None:
            raise InvalidRequest(
                f"{what} cannot be mounted on this node: {problem}.", code="mount_unavailable"
            )


async def _in(threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: Any) -> Result:
    bound = functools.partial(contextvars.copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(threads, bound)


def _prefix(volume: Volume) -> str:
    return f"volumes/{volume.id}"


def _volume_mount(volume: Volume) -> str:
    return f"volume-{volume.id}"


def _view_mount(volume: Volume) -> str:
    return f"view-{volume.id}"


def _workspace_mount(workspace: Workspace) -> str:
    return f"workspace-{workspace.name}"


@contextlib.contextmanager
def _volume_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        # The error has paths of this node, which are not for clients.
        log.warning("volume.failed", name=name, error=str(error))
        words = error.strerror if isinstance(error, OSError) else None
        message = f"{name}: {words or type(error).__name__}."
        if full:
            raise NodeFull(message) from error
        raise TemporaryError(message, code="volume_unavailable") from error
