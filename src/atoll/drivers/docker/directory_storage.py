"""
Sessions' files beneath the data directory, which the engine must see at the same path.

Containers get a place for their socket and their journal too: what user code must not touch there
is closed to it once the executor has opened it, before any user code runs. That takes root, because
files in the container belong to another user.

Where the engine sees what is mounted there, a workspace is a file system image of its size, and so
is the place of socket and journal, which code of a hostile image has before it is closed: the
kernel holds all that a container can write to the disk. Elsewhere they are plain directories, and
the executor watches the workspace's size.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.drivers.docker import container_config, executor_journal, portable_interpreter
from atoll.drivers.docker.storage import (
    InstanceFiles,
    WorkspaceNotCopied,
    WorkspaceNotRemoved,
    file_errors,
)
from atoll.drivers.docker.workspace_upgrade import as_image, unmount_interrupted_move
from atoll.drivers.shared import executor_bundle, tree_copy
from atoll.drivers.shared.disk_images import loop_device_of
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.volumes.mounts import Mount
from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
from atoll.drivers.shared.workspace_files import IMAGE, Workspace, WorkspaceFiles
from atoll.errors import InstanceNotStarted, TemporaryError, WorkspaceLost
from atoll.protocol.limits import JOURNAL_FILE_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources
    from atoll.model.volume import Volume, VolumeMount
    from atoll.settings import LocalSettings

EXECUTOR_IMAGE = "executor"
"""File beside a workspace: the file system of its instances' sockets and journals."""
EXECUTOR_SIZE = 2 * JOURNAL_FILE_SIZE + 16 * 1024 * 1024


class DirectoryStorage:
    journals = True
    copies = True

    def __init__(
        self,
        node: Path,
        settings: LocalSettings,
        bucket: Bucket | None,
        packages: Path,
        *,
        obstacle: str | None,
    ) -> None:
        """`obstacle` is why containers cannot use file system images; null if they can."""
        self._node = node
        self._obstacle = obstacle
        self.quota = obstacle is None
        self._lent: Path | None = None
        """The interpreter for images that have none, once it was needed."""
        self._lending = asyncio.Lock()
        self._instances = node / "instances"
        self._packages = packages
        self.volumes = NodeVolumes(node, self._instances, settings, bucket)
        self._workspaces = WorkspaceFiles(
            node / "workspaces", settings, images=self.quota, own_uids=True
        )

    def close(self) -> None:
        self.volumes.close()

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        self._node.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._node.chmod(0o700)
        self._instances.mkdir(exist_ok=True, mode=0o700)
        self._workspaces.open()
        self.volumes.open(images=self._obstacle)
        self._shared = container_config.shared_mounts(
            str(executor_bundle.write(self._node)),
            str(executor_bundle.write_inside(self._node)),
            str(self._packages),
        )

    async def prepare(self, spec: InstanceSpec) -> InstanceFiles:
        with file_errors(spec.instance_id):
            return await self.volumes.run(self.volumes.waits_for(spec), self._prepare, spec)

    def _prepare(self, spec: InstanceSpec) -> InstanceFiles:
        workspace = self._workspace(spec)
        directory = self._instances / spec.instance_id
        directory.mkdir(mode=0o700, exist_ok=True)
        own = []
        if self.quota:
            own.append(
                Mount(_executor_place(workspace.name), image=self._executor_image(workspace))
            )
        if workspace.kind == IMAGE:
            own.append(self._image_place(workspace))
        self.volumes.attach(spec, workspace, own, views=self.quota)
        uid = container_config.UID if workspace.uid is None else workspace.uid
        link, journal = self._executor_directories(directory, workspace, uid)
        files = self.volumes.files(workspace) or self._files(workspace)
        bind = container_config.bind
        mounts = [
            *self._shared,
            bind(str(files), container_config.WORKSPACE, read_only=False),
            bind(str(link), container_config.LINK, read_only=False),
            bind(str(journal), container_config.JOURNAL, read_only=False),
            *(self._volume(volume, mount) for volume, mount in spec.volumes),
        ]
        return InstanceFiles(mounts, uid, size_is_limited=workspace.kind == IMAGE)

    def _workspace(self, spec: InstanceSpec) -> Workspace:
        name = spec.workspace or spec.instance_id
        found = self._workspaces.get(name)
        if found is None:
            if spec.workspace is not None:
                raise WorkspaceLost(f"Workspace {name} is not on this node.")
            if spec.prefix is not None:
                self.volumes.make_prefix(spec.prefix)
            return self._workspaces.make(name, spec.resources.disk, spec.prefix)
        if self.quota:
            return as_image(self._workspaces, found)
        if found.kind == IMAGE:
            raise InstanceNotStarted(
                f"Workspace {name} is a file system image, which cannot be mounted on this node "
                f"any more: {self._obstacle}.",
            )
        return found

    def _image_place(self, workspace: Workspace) -> Mount:
        image = self._workspaces.path(workspace)
        return Mount(_place(workspace.name), image=image, uid=workspace.uid, owner=workspace.owner)

    def _files(self, workspace: Workspace) -> Path:
        if workspace.kind == IMAGE:
            return self.volumes.path(_place(workspace.name))
        return self._workspaces.path(workspace)

    def _volume(self, volume: Volume, mount: VolumeMount) -> dict[str, Any]:
        if mount.read_only and self.quota:
            # An engine that binds read-only forgets nosuid and nodev. This is read-only here
            # already, and what is bound without a flag of its own keeps all of them.
            return container_config.bind(
                str(self.volumes.view(volume)), mount.path, read_only=False
            )
        source = str(self.volumes.source(volume))
        return container_config.bind(source, mount.path, read_only=mount.read_only)

    # What is the executor's own

    def _executor_image(self, workspace: Workspace) -> Path:
        path = self._workspaces.directory(workspace.name) / EXECUTOR_IMAGE
        if not path.exists():
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            self._workspaces.make_image(new, EXECUTOR_SIZE)
            new.rename(path)
        return path

    def _executor_directories(
        self, directory: Path, workspace: Workspace, uid: int
    ) -> tuple[Path, Path]:
        """Those of socket and journal, which the executor is to open."""
        link, journal = directory / "link", self._journal(workspace, mounted=self.quota)
        # Of an instance whose container somebody else has removed: nothing listens there.
        if link.is_symlink():
            link.unlink()
        remove_tree(link)
        if self.quota:
            target = self.volumes.path(_executor_place(workspace.name)) / "link"
            remove_tree(target)
            link.symlink_to(target)
            link = target
            self._take_over_journal(workspace, journal)
        for place in (link, journal):
            place.mkdir(mode=0o700, exist_ok=True)
            for file in os.scandir(place):
                os.chown(file.path, uid, uid, follow_symlinks=False)
            os.chown(place, uid, uid)
        return link, journal

    def _take_over_journal(self, workspace: Workspace, journal: Path) -> None:
        """What an earlier version kept in a directory."""
        before = self._old_journal(workspace)
        if not before.is_dir():
            return
        if not journal.exists():
            new = journal.with_name("journal.new")
            remove_tree(new)
            new.mkdir(mode=0o700)
            for name in ("0", "1"):
                _copy_journal(before / name, new / name)
            new.rename(journal)
        remove_tree(before)

    def _journal(self, workspace: Workspace, *, mounted: bool) -> Path:
        if mounted:
            return self.volumes.path(_executor_place(workspace.name)) / "journal"
        return self._old_journal(workspace)

    def _old_journal(self, workspace: Workspace) -> Path:
        return self._workspaces.directory(workspace.name) / "journal"

    async def interpreter(self) -> dict[str, Any]:
        async with self._lending:
            if self._lent is None:
                with file_errors("the interpreter"):
                    self._lent = await asyncio.to_thread(portable_interpreter.write, self._node)
        return container_config.bind(str(self._lent), portable_interpreter.PLACE, read_only=True)

    async def seal(self, instance_id: str, workspace: str) -> None:
        await asyncio.to_thread(self._seal, instance_id, workspace)

    def _seal(self, instance_id: str, workspace: str) -> None:
        found = self._workspaces.get(workspace)
        if found is None:
            raise TemporaryError(f"Workspace {workspace} is gone.", code="workspace_lost")
        link = self._instances / instance_id / "link"
        # As the instance was made, whatever can be mounted now.
        journal = self._journal(found, mounted=link.is_symlink())
        for place in (link, journal):
            os.chown(place, 0, 0)
            # What a template imports runs before this, as who owned it until now.
            os.chmod(place, 0o700)
        executor_journal.protect(journal)

    def socket(self, instance_id: str) -> Path:
        return self._instances / instance_id / "link"

    async def clear(self, instance_id: str) -> None:
        with file_errors(instance_id):
            await self.volumes.run(self.volumes.waits(instance_id), self._clear, instance_id)

    def _clear(self, instance_id: str) -> None:
        if not ids.is_instance_id(instance_id):
            raise ValueError(f"{instance_id[:100]!r} is no instance's: nothing is removed by it.")
        with self.volumes.detached(instance_id):
            remove_tree(self._instances / instance_id)

    async def instances(self) -> list[str]:
        with file_errors("this node"):
            return await asyncio.to_thread(lambda: sorted(os.listdir(self._instances)))

    async def discard(self, workspace: str) -> None:
        with file_errors(workspace, WorkspaceNotRemoved):
            await asyncio.to_thread(self._discard, workspace)

    def _discard(self, workspace: str) -> None:
        unmount_interrupted_move(self._workspaces, workspace)
        self._workspaces.remove(workspace)

    async def copy(self, workspace: str, name: str) -> bool:
        abandoned = threading.Event()
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, workspace, name, abandoned))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # A thread cannot be called back. It is told, and ends before the next call can begin.
            abandoned.set()
            await asyncio.wait([copying])
            if not copying.cancelled():
                copying.exception()
            raise

    def _copy(self, workspace: str, name: str, abandoned: threading.Event) -> bool:
        source = self._workspaces.get(workspace)
        if source is None:
            return False
        with file_errors(workspace, WorkspaceNotCopied):
            self._settle(source)
            return self._workspaces.copy(source, name, abandoned)

    def _settle(self, workspace: Workspace) -> None:
        """Have the kernel write to the image all that it holds of it. Nothing runs there."""
        if workspace.kind == IMAGE and loop_device_of(self._workspaces.path(workspace)) is not None:
            self.volumes.sync(self._image_place(workspace))

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._workspaces.names)

    async def fits(self, workspace: str, resources: Resources) -> bool:
        found = await asyncio.to_thread(self._workspaces.get, workspace)
        return found is None or found.kind != IMAGE or found.size >= resources.disk


def _copy_journal(source: Path, target: Path) -> None:
    """A hostile image may have left anything there before it was closed."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise
        return
    with open(fd, "rb") as file, target.open("xb") as copy:
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode) and about.st_size <= JOURNAL_FILE_SIZE:
            tree_copy.copy_content(file.fileno(), copy.fileno(), about.st_size, threading.Event())


def _place(workspace: str) -> str:
    """Name of the mount."""
    return f"image-{workspace}"


def _executor_place(workspace: str) -> str:
    return f"executor-{workspace}"
