"""
What of this node, and of the blob store, several instances are shown.

Volumes on the node's disk or in the bucket, and workspaces that are in the bucket: which of them is
mounted from where, for `mounts` to do, and their making and removal.
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
from atoll.errors import Conflict, InvalidRequest, TemporaryError
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
"""Threads for what may wait for S3, apart from those that everything else shares."""

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

    def open(self, *, images: str | None) -> None:
        """`images` is why there are none, if so. Blocking, as all before the verbs."""
        self._no_images = images
        self._buckets.open(node_groups(self._settings, self._node))
        self._mounts.open(self._settings.mount_scratch if images is None else None)
        self._volumes = VolumeDisks(self._node / "volumes", images=images is None)
        self._volumes.open()

    def close(self) -> None:
        self._buckets.close()

    # Of one instance

    def attach(
        self, spec: InstanceSpec, workspace: Workspace, own: Sequence[Mount] = (), *, views: bool
    ) -> None:
        """
        Mount what the instance is to be shown; its directory must be there. `own` is what it alone
        is shown; with `views`, read-only volumes have mounts of their own.
        """
        places = [place for volume, _ in spec.volumes if (place := self._place(volume)) is not None]
        if workspace.kind == BUCKET:
            name = _of_workspace(workspace)
            places.append(Mount(name, prefix=workspace.prefix, uid=workspace.uid))
        places += own
        if views:
            places += [
                Mount(_view_of(volume), view=self.source(volume))
                for volume, mount in spec.volumes
                if mount.read_only
            ]
        if places:
            self._mounts.note(spec.instance_id, [place.name for place in places])
            for place in places:
                self._mounts.ensure(place)

    def waits_for(self, spec: InstanceSpec) -> bool:
        """Whether an instance like this is shown something of the bucket."""
        return spec.prefix is not None or any(volume.kind == S3 for volume, _ in spec.volumes)

    def waits(self, instance_id: str) -> bool:
        """
        The same of one that is there. Its processes cannot be ended while they wait for S3, nor its
        mounts.
        """
        return any(self._mounts.is_of_bucket(name) for name in self._mounts.noted(instance_id))

    async def run(self, waits: bool, work: Callable[..., Result], *arguments: Any) -> Result:
        """
        Do it in a thread. What `waits` for S3 has threads of its own: if S3 does not answer, only
        those who use it wait.
        """
        if not waits:
            return await asyncio.to_thread(work, *arguments)
        return await _in(self._threads, work, *arguments)

    async def end(self, instance_id: str, kill: Callable[..., None], *arguments: Any) -> None:
        """Kill an instance, in a thread, without a wait for mounts that are being made."""
        if not self.waits(instance_id):
            await asyncio.to_thread(kill, *arguments)
            return
        await _in(self._ends, kill, *arguments)

    @contextlib.contextmanager
    def detached(self, instance_id: str) -> Iterator[None]:
        """Within this the instance's directory goes; then what only it had is unmounted."""
        had = self._mounts.noted(instance_id)
        yield
        # A view, which was mounted last, would keep its volume from being unmounted.
        self._mounts.release(reversed(had))

    def source(self, volume: Volume) -> Path:
        """The directory to bind."""
        if self._place(volume) is not None:
            return self._mounts.path(_of_volume(volume))
        return self._volumes.directory(volume.id)

    def view(self, volume: Volume) -> Path:
        """The same, read-only, of one that was attached with `views`."""
        return self._mounts.path(_view_of(volume))

    def path(self, name: str) -> Path:
        """Where a place of that name is mounted."""
        return self._mounts.path(name)

    def sync(self, place: Mount) -> None:
        """Have the kernel write all that it holds of a place, whichever namespace has it."""
        self._mounts.sync(place)

    def files(self, workspace: Workspace) -> Path | None:
        """The same of a workspace; none of one that is on the node's disk."""
        return self._mounts.path(_of_workspace(workspace)) if workspace.kind == BUCKET else None

    def make_prefix(self, prefix: str) -> None:
        self._mounts.make_prefix(prefix)

    def _place(self, volume: Volume) -> Mount | None:
        """None where there is nothing to mount."""
        if volume.kind == S3:
            return Mount(_of_volume(volume), prefix=_prefix(volume))
        image = self._volumes.image(volume.id)
        return None if image is None else Mount(_of_volume(volume), image=image)

    # Verbs

    def bucket_problem(self) -> str | None:
        return self._buckets.trouble()

    async def make(self, volume: Volume) -> None:
        with _translated(volume.id):
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
                f"Volume {volume.id} can only be used read-only on this node: nothing here would "
                f"hold its size ({self._no_images or 'it was made without an image'}).",
                code="isolation_unavailable",
            )

    async def check_unused(self, volume: Volume) -> None:
        if await asyncio.to_thread(self._mounts.in_use, _of_volume(volume)):
            raise Conflict(f"An instance still has volume {volume.id}.", code="volume_in_use")

    async def remove(self, volume: Volume) -> None:
        await self.check_unused(volume)
        with _translated(volume.id):
            names = [_view_of(volume), _of_volume(volume)]
            await self.run(volume.kind == S3, self._mounts.release, names)
            if volume.kind == S3:
                await self.discard(_prefix(volume))
            else:
                await asyncio.to_thread(self._volumes.remove, volume.id)

    async def broken(self) -> list[str]:
        return await asyncio.to_thread(self._mounts.broken)

    async def discard(self, prefix: str) -> None:
        self._check_bucket("What is in the bucket")
        with _translated(prefix):
            await self.run(True, self._mounts.remove_prefix, prefix)

    def _check_bucket(self, what: str) -> None:
        trouble = self._buckets.trouble()
        if trouble is not None:
            raise InvalidRequest(
                f"{what} cannot be mounted on this node: {trouble}.", code="mount_unavailable"
            )


async def _in(threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: Any) -> Result:
    bound = functools.partial(contextvars.copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(threads, bound)


def _prefix(volume: Volume) -> str:
    return f"volumes/{volume.id}"


def _of_volume(volume: Volume) -> str:
    return f"volume-{volume.id}"


def _view_of(volume: Volume) -> str:
    return f"view-{volume.id}"


def _of_workspace(workspace: Workspace) -> str:
    return f"workspace-{workspace.name}"


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = "node_full" if full else "volume_unavailable"
        # The error names places of this node, which are not for clients.
        log.warning("place.failed", name=name, error=str(error))
        words = error.strerror if isinstance(error, OSError) else None
        raise TemporaryError(f"{name}: {words or type(error).__name__}.", code=code) from error
