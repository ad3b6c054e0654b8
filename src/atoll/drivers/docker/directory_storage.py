"""
Workspaces in directories of this machine, which the engine sees at the same path.

If the engine sees what Atoll mounts, a workspace is a file system image of its size, so that the
kernel limits what a container can write. Otherwise it is a plain directory, and the executor
watches its size. This storage needs root, because the files of a container belong to another user.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.drivers.docker import container_config
from atoll.drivers.docker.executor_files import ExecutorFiles
from atoll.drivers.docker.storage import (
    InstanceFiles,
    WorkspaceNotCopied,
    WorkspaceNotRemoved,
    file_errors,
)
from atoll.drivers.docker.workspace_upgrade import as_image, unmount_interrupted_move
from atoll.drivers.shared import executor_bundle, portable_interpreter
from atoll.drivers.shared.cancellation import run_until_abandoned
from atoll.drivers.shared.disk_images import loop_device_of
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.uids import uid_range
from atoll.drivers.shared.volumes.mounts import Mount
from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
from atoll.drivers.shared.workspace_files import IMAGE, Workspace, WorkspaceFiles
from atoll.errors import InstanceNotStarted, TemporaryError, WorkspaceLost

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources
    from atoll.model.volume import Volume, VolumeMount
    from atoll.settings import LocalSettings


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
        """
        `packages` is the directory of package environments. `obstacle` is why containers cannot use
        file system images; null if they can.
        """
        self._node = node
        self._packages = packages
        self._obstacle = obstacle
        self.quota = obstacle is None
        self._interpreter: Path | None = None
        """The portable interpreter, written when an image without Python is first used."""
        self._interpreter_lock = asyncio.Lock()
        self._instances = node / "instances"
        self.volumes = NodeVolumes(node, self._instances, settings, bucket)
        self._workspaces = WorkspaceFiles(
            node / "workspaces", uid_range(settings), images=self.quota
        )
        self._executor_files = ExecutorFiles(
            self._instances, self._workspaces, self.volumes, images=self.quota
        )

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        self._node.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._node.chmod(0o700)
        self._instances.mkdir(exist_ok=True, mode=0o700)
        self._workspaces.open()
        self.volumes.open(no_images=self._obstacle)
        self._shared = container_config.shared_mounts(
            str(executor_bundle.write(self._node)),
            str(executor_bundle.write_inside(self._node)),
            str(self._packages),
        )

    def close(self) -> None:
        self.volumes.close()

    # Instances

    async def prepare(self, spec: InstanceSpec) -> InstanceFiles:
        with file_errors(spec.instance_id):
            return await self.volumes.run(self.volumes.uses_bucket(spec), self._prepare, spec)

    def _prepare(self, spec: InstanceSpec) -> InstanceFiles:
        workspace, is_new = self._workspace(spec)
        (self._instances / spec.instance_id).mkdir(mode=0o700, exist_ok=True)
        executor = self._executor_files.mount(workspace)
        own = [] if executor is None else [executor]
        if workspace.kind == IMAGE:
            own.append(self._image_mount(workspace, new=is_new))
        self.volumes.attach(spec, workspace, own, views=self.quota)
        uid = container_config.UID if workspace.uid is None else workspace.uid
        link, journal = self._executor_files.prepare(spec.instance_id, workspace, uid)
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

    def _workspace(self, spec: InstanceSpec) -> tuple[Workspace, bool]:
        """The workspace of an instance, and whether it was made for it."""
        name = spec.workspace or spec.instance_id
        found = self._workspaces.get(name)
        if found is None:
            if spec.workspace is not None:
                raise WorkspaceLost(f"Workspace {name} is not on this node.")
            if spec.prefix is not None:
                self.volumes.make_prefix(spec.prefix)
            return self._workspaces.make(name, spec.resources.disk, spec.prefix), True
        if self.quota:
            return as_image(self._workspaces, found), False
        if found.kind == IMAGE:
            raise InstanceNotStarted(
                f"Workspace {name} is a file system image, which this node cannot mount any more: "
                f"{self._obstacle}."
            )
        return found, False

    def _image_mount(self, workspace: Workspace, *, new: bool = False) -> Mount:
        image = self._workspaces.path(workspace)
        name = _mount_name(workspace)
        return Mount(name, image=image, uid=workspace.uid, owner=workspace.owner, new=new)

    def _files(self, workspace: Workspace) -> Path:
        if workspace.kind == IMAGE:
            return self.volumes.path(_mount_name(workspace))
        return self._workspaces.path(workspace)

    def _volume(self, volume: Volume, mount: VolumeMount) -> dict[str, Any]:
        read_only, source = mount.read_only, self.volumes.source(volume)
        if read_only and self.quota:
            # A read-only bind of the engine would lose nosuid and nodev. This view is read-only
            # already, and a bind without options keeps all its flags.
            read_only, source = False, self.volumes.view(volume)
        return container_config.bind(str(source), mount.path, read_only=read_only)

    async def interpreter(self) -> dict[str, Any]:
        async with self._interpreter_lock:
            if self._interpreter is None:
                with file_errors("the interpreter"):
                    self._interpreter = await asyncio.to_thread(
                        portable_interpreter.write, self._node
                    )
        source = str(self._interpreter)
        return container_config.bind(source, portable_interpreter.TARGET, read_only=True)

    async def seal(self, instance_id: str, workspace: str) -> None:
        await asyncio.to_thread(self._seal, instance_id, workspace)

    def _seal(self, instance_id: str, workspace: str) -> None:
        found = self._workspaces.get(workspace)
        if found is None:
            raise TemporaryError(f"Workspace {workspace} is gone.", code="workspace_lost")
        self._executor_files.seal(instance_id, found)

    def socket(self, instance_id: str) -> Path:
        return self._executor_files.socket_directory(instance_id)

    async def clear(self, instance_id: str) -> None:
        with file_errors(instance_id):
            await self.volumes.run(
                self.volumes.has_bucket_mounts(instance_id), self._clear, instance_id
            )

    def _clear(self, instance_id: str) -> None:
        if not ids.is_instance_id(instance_id):
            raise ValueError(f"{instance_id[:100]!r} is not an instance id; nothing was removed.")
        with self.volumes.detached(instance_id):
            remove_tree(self._instances / instance_id)

    async def instances(self) -> list[str]:
        with file_errors("this node"):
            return await asyncio.to_thread(lambda: sorted(os.listdir(self._instances)))

    # Workspaces

    async def discard(self, workspace: str) -> None:
        with file_errors(workspace, WorkspaceNotRemoved):
            await asyncio.to_thread(self._discard, workspace)

    def _discard(self, workspace: str) -> None:
        unmount_interrupted_move(self._workspaces, workspace)
        self._workspaces.remove(workspace)

    async def copy(self, workspace: str, name: str) -> bool:
        return await run_until_abandoned(lambda abandoned: self._copy(workspace, name, abandoned))

    def _copy(self, workspace: str, name: str, abandoned: threading.Event) -> bool:
        source = self._workspaces.get(workspace)
        if source is None:
            return False
        with file_errors(workspace, WorkspaceNotCopied):
            self._flush(source)
            return self._workspaces.copy(source, name, abandoned)

    def _flush(self, workspace: Workspace) -> None:
        """Write everything to the image that the kernel has buffered; no process is running."""
        if workspace.kind == IMAGE and loop_device_of(self._workspaces.path(workspace)) is not None:
            self.volumes.sync(self._image_mount(workspace))

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._workspaces.names)

    async def fits(self, workspace: str, resources: Resources) -> bool:
        found = await asyncio.to_thread(self._workspaces.get, workspace)
        return found is None or found.kind != IMAGE or found.size >= resources.disk


def _mount_name(workspace: Workspace) -> str:
    return f"image-{workspace.name}"
