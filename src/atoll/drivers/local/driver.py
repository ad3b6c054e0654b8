"""
Instances on this machine.

An instance's directory is made before it is started and removed after it has ended; its handle is
written there as soon as it runs. So a control plane that starts again finds everything: `handles`
reads the directories, not memory. One without a handle is the rest of a start that was interrupted;
what of it still runs is found by its control groups, and on a host without them by nobody.

What the host refuses while an instance is made is a `TemporaryError`, and nothing of it runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.drivers.base import NodeStatus
from atoll.drivers.local import debian_layers as layering
from atoll.drivers.local import host_checks, root_file_system, sandbox
from atoll.drivers.local.handle_files import HANDLE_VERSION, HandleFiles
from atoll.drivers.local.images import LocalImages, check_no_image
from atoll.drivers.local.installer import Ground, Installer
from atoll.drivers.local.instance_state import InstanceStates
from atoll.drivers.local.limits import LocalLimits, LocalResizing
from atoll.drivers.local.pausing import LocalPausing
from atoll.drivers.local.spawner import ROOT
from atoll.drivers.local.spawner_client import DataDirectory, SpawnerClient
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
from atoll.drivers.shared.machine_load import Machine
from atoll.drivers.shared.packages.environments import NodeEnvironments
from atoll.drivers.shared.packages.installation import uv_binary
from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
from atoll.drivers.shared.workspace_files import IMAGE, Workspace, WorkspaceFiles
from atoll.drivers.shared.zygote_confinement import Confinement
from atoll.errors import (
    AtollError,
    InstanceNotStarted,
    InvalidRequest,
    NodeFull,
    PermanentError,
    TemporaryError,
    WorkspaceLost,
)
from atoll.link.client import Link
from atoll.link.errors import LinkLost
from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation, State
from atoll.model.template import REQUIREMENTS
from atoll.protocol.limits import JOURNAL_FILE_SIZE
from atoll.settings import PackageSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.model.template import Template
    from atoll.settings import LinkSettings, LocalSettings


CALLBACK = "callback.json"
FROZEN_SECONDS = 0.02
"""How often an instance that is to end is checked for being frozen."""
STAGES = ("/mnt", "/media", "/srv", "/opt")

log = structlog.get_logger(__name__)


class LocalDriver:
    kind = "local"

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
        home = DataDirectory(
            str(data_dir.resolve()),
            [str(path) for path in data_directories.lock_files(data_dir)],
            link.unattended_limit.total_seconds(),
        )
        self._nursery = SpawnerClient(link.start_timeout, home)
        self._groups: cgroups.ControlGroups = cgroups.NoControlGroups()
        self._new: set[str] = set()
        """Instances that nobody has been connected to yet."""
        self._failure: str | None = None
        """Why the last start failed; none when it did not."""
        self._machine = Machine(self._node)
        self.capabilities = Capabilities(frozenset())
        self._handles = HandleFiles(self._instances, self.kind)
        self.packages = NodeEnvironments(
            self._node, root=self._root, tree=self.images.tree, image=self.images.identity
        )
        self.volumes = NodeVolumes(self._node, self._instances, settings, bucket)
        # Made by open(), which finds out what the machine has.
        self.workspaces: LocalWorkspaces
        self.limits: LocalLimits
        self.resizing: LocalResizing
        self.pausing: LocalPausing | None = None

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

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
        trouble = disk_images.images_problem(self._node)
        self._files = WorkspaceFiles(
            self._node / "workspaces", self._settings, images=trouble is None, own_uids=self._root
        )
        self._files.open()
        self.volumes.open(images=trouble)
        self._groups = cgroups.node_groups(self._settings, self._node)
        self.images.open(self._node)
        self._executor = executor_bundle.write(self._node)
        self._inside = executor_bundle.write_inside(self._node)
        program = seccomp.program()
        self._seccomp = self._node / "seccomp.bpf"
        if program is not None:
            root_file_system.write_once(self._seccomp, program)
        hidden = [path for path in sandbox.HIDDEN if os.path.exists(path)]
        self._hidden = tuple(f"{path}/" if os.path.isdir(path) else path for path in hidden)
        ground = layering.Ground(
            bubblewrap=bubblewrap,
            groups=self._groups,
            hidden=self._hidden,
            seccomp=None if program is None else self._seccomp,
        )
        self._layers.open(ground, host_checks.layer_trouble(self._node))
        self.packages.open(self._installer(filtered=program is not None))
        provides = set(self._groups.provides)
        if self._root:
            provides.add("own_uid")
        if self._files.images:
            provides.add("disk_quota")
        if program is not None:
            provides.add("seccomp")
        missing = {name: words for name, words in REQUIREMENTS.items() if name not in provides}
        if trouble is not None:
            missing["disk_quota"] += f": {trouble}"
        self._states = InstanceStates(self._groups, self._nursery)
        self.workspaces = LocalWorkspaces(self._files, self._handles, self._states)
        self.limits = LocalLimits(self._groups, self._files)
        self.resizing = LocalResizing(self._groups, self._files)
        unavailable = {}
        if self._groups.freezes:
            self.pausing = LocalPausing(self._groups, self._states)
        else:
            unavailable["pausing"] = "it has no freezer for control groups"
        self.capabilities = Capabilities(frozenset(provides), missing, unavailable)

    def _installer(self, *, filtered: bool) -> Installer | None:
        uv = uv_binary()
        if uv is None:
            return None
        ground = Ground(
            node=self._node,
            bubblewrap=self._bubblewrap,
            uv=uv,
            nursery=self._nursery,
            groups=self._groups,
            settings=self._settings,
            hidden=self._hidden,
            seccomp=self._seccomp if filtered else None,
            mounts=str(self.volumes.mounts),
            stage=self._stage if self._root else None,
            images=self._files.images,
        )
        installer = Installer(ground)
        installer.open()
        return installer

    async def close(self) -> None:
        await self._nursery.close()
        await asyncio.to_thread(self._groups.close)

    # Templates

    async def check(self, template: Template) -> None:
        check_no_image(template)
        missing = [name for name in template.require if name in self.capabilities.missing]
        if missing:
            words = "; ".join(f"{name} ({self.capabilities.missing[name]})" for name in missing)
            raise InvalidRequest(
                f"Template {template.id} demands what this node cannot give: {words}. "
                "`atoll doctor` says what is missing and why.",
                code="isolation_unavailable",
                missing=missing,
            )
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
            # Neither a thread nor a process under way can be called back. That step comes to its
            # end, so that it does not run beside the next call, and what was made goes.
            abandoned.set()
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                await self.destroy(making.result())
            if spec.workspace is None and spec.prefix is None:
                await self.workspaces.discard(spec.instance_id)
            raise

    async def _make(self, spec: InstanceSpec, abandoned: asyncio.Event) -> Handle:
        tree = await self.images.tree(spec.template)
        waits = self.volumes.waits_for(spec)
        handle = None
        try:
            workspace = await self.volumes.run(waits, self._prepare, spec)
            if abandoned.is_set():
                raise asyncio.CancelledError
            pid, child = await self._nursery.spawn(self._request(spec, tree, workspace))
            handle = self._handle(spec, workspace, pid, child)
            await asyncio.to_thread(self._handles.write, handle)
        except BaseException:
            undone = self.volumes.run(waits, self._give_up, spec.instance_id, handle)
            await asyncio.shield(undone)
            raise
        self._failure = None
        self._states.add(spec.instance_id)
        self._new.add(spec.instance_id)
        return handle

    def _prepare(self, spec: InstanceSpec) -> Workspace:
        directory = self._instances / spec.instance_id
        if directory.exists():
            self._clear(spec.instance_id)
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
            _write_secret(directory / CALLBACK, json.dumps(asdict(spec.callback)))
        self.volumes.attach(spec, workspace, views=False)
        self._groups.make(spec.instance_id, spec.resources)
        return workspace

    def _give_up(self, instance_id: str, handle: Handle | None) -> None:
        try:
            if handle is not None:
                self._kill_now(handle)
        finally:
            self._clear(instance_id)

    def _request(
        self, spec: InstanceSpec, tree: sandbox.RootFileSystem, workspace: Workspace
    ) -> dict[str, Any]:
        directory = self._instances / spec.instance_id
        path = str(self.volumes.files(workspace) or self._files.path(workspace))
        binds: dict[str, str] = {}
        stage = self._stage(tree, path) if self._root else None
        unattended = self._link_settings.unattended_grace
        box = sandbox.Sandbox(
            tree=tree,
            executor=str(self._executor),
            inside=str(self._inside),
            workspace=path,
            packages=str(self.packages.place),
            environment=self._environment(spec.template),
            hidden=self._hidden,
            tmp_size=self._settings.tmp_size,
            preload=spec.template.preload,
            # The default template is this machine's interpreter, without this machine's hooks.
            hooks=bool(spec.template.root or spec.template.python),
            seccomp="seccomp" in self.capabilities.provides,
            ephemeral=spec.ephemeral,
            unattended=None if spec.ephemeral else unattended.total_seconds(),
            reports_as=spec.instance_id if spec.callback is not None else None,
            volumes=tuple(
                (str(self.volumes.source(volume)), mount.path, mount.read_only)
                for volume, mount in spec.volumes
            ),
        )

        def source(host_path: str) -> str:
            if stage is None:
                return host_path
            if host_path.startswith(sandbox.LAYERED):
                return f"{stage}/{ROOT}{host_path.removeprefix(sandbox.LAYERED)}"
            if host_path == path and workspace.kind == IMAGE:
                return f"{stage}/workspace"
            return f"{stage}/{binds.setdefault(host_path, str(len(binds)))}"

        argv = sandbox.arguments(self._bubblewrap, box, source)
        return {
            "instance": spec.instance_id,
            "argv": argv,
            "directory": str(directory),
            "log": None,
            "seccomp": str(self._seccomp) if box.seccomp else None,
            "groups": self._groups.join_files(spec.instance_id),
            "uid": workspace.uid,
            "rlimits": {
                "CORE": 0,
                # What the executor may write: files of the workspace, and its journal.
                "FSIZE": max(spec.resources.disk, JOURNAL_FILE_SIZE),
                "NOFILE": self._settings.open_files,
                "MEMLOCK": 65_536,
                "MSGQUEUE": 819_200,
                "SIGPENDING": 4096,
            },
            "stage": stage,
            "binds": list(binds.items()),
            "layers": list(tree.layers),
            "mounts": str(self.volumes.mounts),
            "image": path if workspace.kind == IMAGE else None,
            "owner": workspace.owner,
            "callback": str(directory / CALLBACK) if spec.callback is not None else None,
            "journal": [str(file) for file in self._files.journal(workspace)],
            "ephemeral": spec.ephemeral,
        }

    def _environment(self, template: Template) -> str | None:
        name = template.build.environment if template.build is not None else None
        return None if name is None else self.packages.inside(name)

    @staticmethod
    def _stage(tree: sandbox.RootFileSystem, workspace: str) -> str:
        """
        A directory that any uid can reach and that hides nothing when something is mounted on it.
        """
        used = [os.path.realpath(path) for path in (*dict(tree.binds), *tree.layers, workspace)]
        for stage in STAGES:
            if os.path.isdir(stage) and not any(path.startswith(f"{stage}/") for path in used):
                return stage
        raise PermanentError(f"None of {', '.join(STAGES)} can be used to start an instance.")

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
        directory = self._instances / handle.instance_id
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
            raise await self._explained(handle, error) from error
        finally:
            os.close(fd)
        try:
            failed = await Confinement(self._groups, handle.instance_id, link).settle()
            if failed:
                words = "; ".join(f"{name}: {why}" for name, why in failed.items())
                raise PermanentError(f"Preloading failed: {words}", code="preload_failed")
        except BaseException:
            link.close()
            raise
        return link

    async def _explained(self, handle: Handle, error: LinkLost) -> AtollError:
        """Why an instance does not answer: what it printed before it ended, if it has."""
        if (await self.observe(handle)).state in (State.RUNNING, State.PAUSED):
            return error
        output = self._states.output(handle)
        if not output:
            return error
        return PermanentError(
            f"Instance {handle.instance_id} ended at its start: {output}",
            code="instance_failed",
        )

    # The end

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        # Who stands still cannot be asked, and is not let go on for it.
        if grace and not self._groups.frozen(handle.instance_id):
            # Whatever keeps it from ending by itself, the kernel does not ask.
            with contextlib.suppress(AtollError, TimeoutError):
                async with asyncio.timeout(grace.total_seconds()):
                    link = await self.connect(handle)
                    try:
                        await link.call("shutdown")
                        await link.closed
                    finally:
                        link.close()
        await self._kill(handle)

    async def _kill(self, handle: Handle) -> None:
        """End the instance: with its PID 1 the kernel ends every process of the namespace."""
        data = handle.data
        if data["boot"] != processes.boot_id():
            return
        await self.volumes.end(handle.instance_id, self._kill_now, handle)

    def _kill_now(self, handle: Handle) -> None:
        data = handle.data
        deadline = time.monotonic() + 10
        both = [
            (int(data[pid]), int(data[started]))
            for pid, started in (("child", "child_started"), ("pid", "started"))
        ]
        for pid, started in both:
            processes.kill(pid, started)
        for pid, started in both:
            while True:
                if self._groups.frozen(handle.instance_id):
                    cgroups.kill_all(self._groups, handle.instance_id)
                if processes.wait(pid, started, FROZEN_SECONDS):
                    break
                if time.monotonic() > deadline:
                    raise TemporaryError(f"Process {pid} does not end.", code="instance_stuck")

    async def destroy(self, handle: Handle) -> None:
        await self._kill(handle)
        waits = self.volumes.waits(handle.instance_id)
        await self.volumes.run(waits, self._clear, handle.instance_id)
        self._states.forget(handle)
        self.limits.forget(handle.instance_id)
        self._new.discard(handle.instance_id)

    def _clear(self, instance_id: str) -> None:
        """Remove groups and directory; processes of an interrupted start go with their groups."""
        deadline = time.monotonic() + 10
        while True:
            try:
                self._groups.remove(instance_id)
                break
            except cgroups.GroupBusy:
                cgroups.kill_all(self._groups, instance_id)
                if time.monotonic() > deadline:
                    raise TemporaryError(
                        f"Processes of instance {instance_id} do not end.", code="instance_stuck"
                    ) from None
                time.sleep(0.002)
        with self.volumes.detached(instance_id):
            shutil.rmtree(self._instances / instance_id, ignore_errors=True)

    # What is there

    async def handles(self) -> list[Handle]:
        try:
            return await asyncio.to_thread(self._list_handles)
        except OSError as error:
            raise TemporaryError(
                f"The instances of this node cannot be listed: {error}", code="node_unavailable"
            ) from error

    def _tidy(self, groups: list[str], directories: set[str]) -> None:
        """
        Remove groups of instances that are not there: a directory is made before the groups and
        removed after them, so groups that were seen first and have none are left over.
        """
        for name in groups:
            if not ids.is_instance_id(name) or name in directories:
                continue
            try:
                # Nobody makes an instance of the name while it is taken.
                (self._instances / name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            log.warning("instance.groups_orphaned", instance_id=name)
            try:
                self._clear(name)
            except TemporaryError as error:
                log.warning("instance.groups_stay", instance_id=name, error=error.message)

    def _list_handles(self) -> list[Handle]:
        groups = self._groups.names()
        self._tidy(groups, self._handles.names())
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
        words = f"{error} {output.decode(errors='replace')[-LOG_TAIL:]}".strip()
        message = f"Instance {instance_id} could not be started: {words}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeFull(message) from error
        raise InstanceNotStarted(message) from error


def _write_secret(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
