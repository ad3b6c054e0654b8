"""
Instances on this machine.

An instance's directory is made before it starts and removed after it has ended; its handle is
written there as soon as it runs. So a control plane that starts again finds everything: `handles`
reads the directories, not memory. A directory without a handle is left of a start that was
interrupted; its processes are found by their control groups, and not at all on a host without any.

What the host refuses while an instance is made is a `TemporaryError`, and nothing of it keeps
running.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.base import NodeStatus
from atoll.drivers.local import debian_layers as layering
from atoll.drivers.local import host_checks, leftovers, root_file_system, sandbox
from atoll.drivers.local.capabilities import find_capabilities
from atoll.drivers.local.handle_files import HANDLE_VERSION, HandleFiles
from atoll.drivers.local.images import LocalImages, check_no_image
from atoll.drivers.local.installer import Installer
from atoll.drivers.local.instance_removal import InstanceRemoval
from atoll.drivers.local.instance_request import CALLBACK_FILE, InstanceRequests
from atoll.drivers.local.instance_state import InstanceStates
from atoll.drivers.local.limits import LocalLimits
from atoll.drivers.local.pausing import LocalPausing
from atoll.drivers.local.resizing import LocalResizing
from atoll.drivers.local.sandbox_host import SandboxHost, free_stage
from atoll.drivers.local.sandbox_start import OWNER
from atoll.drivers.local.spawner_client import DataDirectory, ForkServer, SpawnerClient
from atoll.drivers.local.workspaces import LocalWorkspaces
from atoll.drivers.shared import (
    cgroups,
    data_directories,
    disk_images,
    executor_bundle,
    processes,
    seccomp,
)
from atoll.drivers.shared.bounded_log import LOG_TAIL
from atoll.drivers.shared.executor_bundle import FORK_SERVER_BOOT
from atoll.drivers.shared.executor_links import release_zygote, shut_down
from atoll.drivers.shared.instance_paths import EXECUTOR
from atoll.drivers.shared.machine_load import MachineLoad
from atoll.drivers.shared.packages.environments import NodeEnvironments
from atoll.drivers.shared.packages.installation import uv_binary
from atoll.drivers.shared.requirements import check_requirements
from atoll.drivers.shared.uids import uid_range
from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
from atoll.drivers.shared.workspace_files import Workspace, WorkspaceFiles
from atoll.errors import (
    AtollError,
    InstanceNotStarted,
    NodeFull,
    PermanentError,
    TemporaryError,
    WorkspaceLost,
)
from atoll.link.client import Link
from atoll.link.errors import LinkLost
from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation, State
from atoll.settings import PackageSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.model.template import Template
    from atoll.settings import LinkSettings, LocalSettings


log = structlog.get_logger(__name__)


class LocalDriver:
    kind = "local"
    disruptions = None
    ownership = None

    def __init__(
        self,
        data_dir: Path,
        settings: LocalSettings,
        link: LinkSettings,
        bucket: Bucket | None = None,
        *,
        packages: PackageSettings | None = None,
    ) -> None:
        self._settings = settings
        self._link_settings = link
        self._node = data_dir / data_directories.NODE_DIRECTORY
        self._instances = self._node / "instances"
        self._root = os.geteuid() == 0
        self._layers = layering.Layers(
            self._node / "layers", settings, packages or PackageSettings()
        )
        roots = (*settings.template_roots, data_dir / "rootfs")
        self.images = LocalImages(self._layers, roots, settings.python)
        self._home = DataDirectory(
            str(data_dir.resolve()),
            [str(path) for path in data_directories.lock_files(data_dir)],
            link.unattended_limit.total_seconds(),
            leftovers.owner_mark(data_dir.resolve()),
        )
        self._spawner = SpawnerClient(link.start_timeout, self._home)
        self._groups = cgroups.ControlGroups()
        self._new: set[str] = set()
        """Instances that have not been connected to yet."""
        self._failure: str | None = None
        """Why the last start failed; None if it did not."""
        self._machine = MachineLoad(self._node)
        self.capabilities = Capabilities(frozenset())
        self._handles = HandleFiles(self._instances, self.kind)
        self.packages = NodeEnvironments(
            self._node, root=self._root, tree=self.images.tree, image=self.images.identity
        )
        self.volumes = NodeVolumes(self._node, self._instances, settings, bucket)
        # Made by open(), which finds out what the machine has.
        self._states: InstanceStates
        self._requests: InstanceRequests
        self._removal: InstanceRemoval
        self.workspaces: LocalWorkspaces
        self.limits: LocalLimits
        self.resizing: LocalResizing
        self.pausing: LocalPausing | None = None

    async def open(self) -> None:
        await asyncio.to_thread(self._open)
        if self._root:
            stage, uid = free_stage([str(self._node)]), self._settings.uid_base
            await self._spawner.prepare(self._requests.fork_server, stage, uid)
        else:
            await self._spawner.prepare()

    def _open(self) -> None:
        bubblewrap = shutil.which(self._settings.bubblewrap)
        if bubblewrap is None:
            raise PermanentError(
                "bubblewrap is not installed; install it with: apt-get install bubblewrap",
                code="bubblewrap_missing",
            )
        self._bubblewrap = bubblewrap
        self._instances.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._node.chmod(0o700)
        no_images = disk_images.images_problem(self._node)
        self._files = WorkspaceFiles(
            self._node / "workspaces",
            uid_range(self._settings) if self._root else None,
            images=no_images is None,
        )
        self._files.open()
        self.volumes.open(no_images=no_images)
        self._groups = cgroups.node_groups(self._settings, self._node)
        self.images.open(self._node)
        program = seccomp.program()
        if program is not None:
            root_file_system.write_once(self._node / "seccomp.bpf", program)
        hidden = [path for path in sandbox.HIDDEN if os.path.exists(path)]
        host = SandboxHost(
            bubblewrap=bubblewrap,
            groups=self._groups,
            hidden=tuple(f"{path}/" if os.path.isdir(path) else path for path in hidden),
            seccomp=None if program is None else self._node / "seccomp.bpf",
            mounts=str(self.volumes.mounts),
            staged=self._root,
        )
        self._layers.open(host, host_checks.layer_problem(self._node))
        self.packages.open(self._installer(host))
        executor = executor_bundle.write(self._node)
        inside = executor_bundle.write_inside(self._node)
        self._requests = InstanceRequests(
            host=host,
            executor=executor,
            inside=inside,
            fork_server=self._fork_server(executor, inside),
            files=self._files,
            volumes=self.volumes,
            packages=self.packages,
            settings=self._settings,
            link=self._link_settings,
        )
        self._states = InstanceStates(self._groups, self._spawner)
        self._removal = InstanceRemoval(self._groups, self._handles, self.volumes)
        self.workspaces = LocalWorkspaces(self._files, self._handles, self._states)
        self.limits = LocalLimits(self._groups, self._files)
        self.resizing = LocalResizing(self._groups, self._files)
        if self._groups.freezes:
            self.pausing = LocalPausing(self._groups, self._states)
        self.capabilities = find_capabilities(
            self._groups, own_uids=self._root, no_images=no_images, seccomp=program is not None
        )

    def _fork_server(self, executor: Path, inside: Path) -> ForkServer | None:
        if host_checks.fork_problem(self._settings) is not None:
            return None
        tree = self.images.default_tree()
        boot = FORK_SERVER_BOOT.format(path=EXECUTOR)
        return ForkServer(
            argv=[tree.python, "-I", "-S", "-B", "-c", boot, OWNER],
            files=sandbox.fork_server_files(tree, str(executor), str(inside)),
            environment={
                **sandbox.instance_environment(tree.python, tree.path),
                OWNER: self._home.mark,
            },
        )

    def _installer(self, host: SandboxHost) -> Installer | None:
        uv = uv_binary()
        if uv is None:
            return None
        installer = Installer(
            self._node / "installs", host, self._spawner, uv, self._settings, self._files.images
        )
        installer.open()
        return installer

    async def close(self) -> None:
        await self._spawner.close()
        await asyncio.to_thread(self._groups.close)

    # Templates

    async def check(self, template: Template) -> None:
        check_no_image(template)
        check_requirements(template, self.capabilities)
        await self.images.check(template)

    # Instances

    async def ensure(self, spec: InstanceSpec) -> Handle:
        try:
            with _start_errors(spec.instance_id):
                return await self._ensure(spec)
        except (NodeFull, InstanceNotStarted) as error:
            self._failure = error.message
            raise

    async def _ensure(self, spec: InstanceSpec) -> Handle:
        found = await asyncio.to_thread(self._handles.read, spec.instance_id)
        if found is not None:
            if (await self.observe(found)).state in (State.RUNNING, State.PAUSED):
                return found
            await self.destroy(found)
        abandoned = asyncio.Event()
        making = asyncio.ensure_future(self._make(spec, abandoned))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread or a process cannot be cancelled. The step must end before the next call
            # begins, and what it made is removed.
            abandoned.set()
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                await self.destroy(making.result())
            if spec.workspace is None and spec.prefix is None:
                await self.workspaces.discard(spec.instance_id)
            raise

    async def _make(self, spec: InstanceSpec, abandoned: asyncio.Event) -> Handle:
        tree = await self.images.tree(spec.template)
        uses_bucket = self.volumes.uses_bucket(spec)
        handle = None
        try:
            workspace = await self.volumes.run(uses_bucket, self._prepare, spec)
            if abandoned.is_set():
                raise asyncio.CancelledError
            directory = self._handles.directory(spec.instance_id)
            request = self._requests.make(spec, tree, workspace, directory)
            pid, child = await self._spawner.spawn(request)
            handle = self._handle(spec, workspace, pid, child)
            await asyncio.to_thread(self._handles.write, handle)
        except BaseException:
            undone = self.volumes.run(uses_bucket, self._removal.undo, spec.instance_id, handle)
            await asyncio.shield(undone)
            raise
        self._failure = None
        self._states.add(spec.instance_id)
        self._new.add(spec.instance_id)
        return handle

    def _prepare(self, spec: InstanceSpec) -> Workspace:
        directory = self._handles.directory(spec.instance_id)
        if directory.exists():
            self._removal.clear(spec.instance_id)
        name = spec.workspace or spec.instance_id
        workspace = self._files.get(name)
        if workspace is not None:
            self._files.repair(workspace)
        elif spec.workspace is None:
            if spec.prefix is not None:
                self.volumes.make_prefix(spec.prefix)
            workspace = self._files.make(name, spec.resources.disk, spec.prefix)
        else:
            raise WorkspaceLost(f"Workspace {name} is not on this node.")
        directory.mkdir(mode=0o700)
        if spec.callback is not None:
            _write_secret(directory / CALLBACK_FILE, json.dumps(asdict(spec.callback)))
        self.volumes.attach(spec, workspace, views=False)
        self._groups.make(spec.instance_id, spec.resources)
        return workspace

    def _handle(self, spec: InstanceSpec, workspace: Workspace, pid: int, child: int) -> Handle:
        data: dict[str, str | int] = {
            "pid": pid,
            "started": processes.start_time(pid) or 0,
            "child": child,
            "child_started": processes.start_time(child) or 0,
            "boot": processes.boot_id(),
            "workspace": workspace.name,
        }
        return Handle(spec.instance_id, self.kind, HANDLE_VERSION, data)

    async def observe(self, handle: Handle) -> Observation:
        return await self._states.observe(handle)

    async def connect(self, handle: Handle) -> Link:
        directory = self._handles.directory(handle.instance_id)
        try:
            fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LinkLost(f"Instance {handle.instance_id} is gone.") from None
        try:
            if self._groups.frozen(handle.instance_id):
                raise LinkLost(f"Instance {handle.instance_id} is paused.")
            # Through the descriptor, as the spawner bound it.
            path = f"/proc/self/fd/{fd}/link.sock"
            new = handle.instance_id in self._new
            settings = self._link_settings
            timeout = settings.start_timeout if new else settings.connect_timeout
            link = await Link.connect(path, settings, timeout=timeout)
            self._new.discard(handle.instance_id)
        except LinkLost as error:
            raise await self._explain(handle, error) from error
        finally:
            os.close(fd)
        try:
            await release_zygote(link, self._groups, handle.instance_id)
        except BaseException:
            link.close()
            raise
        return link

    async def _explain(self, handle: Handle, error: LinkLost) -> AtollError:
        """Why an instance does not answer: what it printed before it ended, if it has ended."""
        if (await self.observe(handle)).state in (State.RUNNING, State.PAUSED):
            return error
        output = self._states.output(handle)
        if not output:
            return error
        return PermanentError(
            f"Instance {handle.instance_id} ended at its start: {output}",
            code="instance_failed",
        )

    # End of an instance

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        # A frozen executor cannot answer, and is not resumed for that.
        if grace and not self._groups.frozen(handle.instance_id):
            await shut_down(self.connect(handle), grace)
        await self._kill(handle)

    async def _kill(self, handle: Handle) -> None:
        await self.volumes.end(handle.instance_id, self._removal.kill, handle)

    async def destroy(self, handle: Handle) -> None:
        await self._kill(handle)
        uses_bucket = self.volumes.has_bucket_mounts(handle.instance_id)
        await self.volumes.run(uses_bucket, self._removal.clear, handle.instance_id)
        self._states.forget(handle)
        self.limits.forget(handle.instance_id)
        self._new.discard(handle.instance_id)

    # The node

    async def handles(self) -> list[Handle]:
        try:
            return await asyncio.to_thread(self._list_handles)
        except OSError as error:
            raise TemporaryError(
                f"The instances of this node cannot be listed: {error}", code="node_unavailable"
            ) from error

    def _list_handles(self) -> list[Handle]:
        self._removal.remove_orphaned_groups()
        return self._handles.all()

    async def status(self) -> NodeStatus:
        return await asyncio.to_thread(self._status)

    def _status(self) -> NodeStatus:
        return NodeStatus(self._problem(), self._machine.metrics())

    def _problem(self) -> str | None:
        if not os.access(self._bubblewrap, os.X_OK):
            return f"{self._bubblewrap} does not exist any more, or cannot be executed"
        if not os.access(self._instances, os.W_OK | os.X_OK):
            return f"{self._instances} cannot be written to"
        return self._failure


@contextlib.contextmanager
def _start_errors(instance_id: str) -> Iterator[None]:
    """Translate what the host reports when it cannot start an instance."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        reason = f"{error} {output.decode(errors='replace')[-LOG_TAIL:]}".strip()
        message = f"Instance {instance_id} could not be started: {reason}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeFull(message) from error
        raise InstanceNotStarted(message) from error


def _write_secret(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
