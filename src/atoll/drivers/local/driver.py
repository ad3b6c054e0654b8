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
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.drivers.base import NO_MATERIAL
from atoll.drivers.local import host, sandbox, trees
from atoll.drivers.local import layers as layering
from atoll.drivers.local.installer import Ground, Installer
from atoll.drivers.local.nursery import Home, Nursery
from atoll.drivers.local.spawner import ROOT
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
from atoll.drivers.shared.packages.environments import LocalEnvironments
from atoll.drivers.shared.packages.installation import uv_binary
from atoll.drivers.shared.volumes.node_volumes import Places
from atoll.drivers.shared.workspaces import IMAGE, Workspace, Workspaces
from atoll.drivers.shared.zygote_confinement import Confinement
from atoll.errors import (
    AtollError,
    Conflict,
    InvalidRequest,
    PermanentError,
    TemporaryError,
    WorkspaceLost,
)
from atoll.link.client import Link
from atoll.link.errors import LinkLost
from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation, State
from atoll.model.session import Cause
from atoll.model.template import REQUIREMENTS
from atoll.protocol.limits import JOURNAL_FILE_SIZE
from atoll.settings import PackageSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime, timedelta
    from pathlib import Path

    from atoll.drivers.base import Material
    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.model.image import ImageInfo
    from atoll.model.node import NodeMetrics
    from atoll.model.resources import Resources
    from atoll.model.template import Layer, Template
    from atoll.settings import LinkSettings, LocalSettings

NODE = "node"
"""The driver's directory in the data directory."""
HANDLE_VERSION = 1
CALLBACK = "callback.json"
PAUSE_SECONDS = 10.0
"""The longest that processes may take to stand still."""
TOLD_SECONDS = 1.0
"""The longest that an instance which has ended is waited for to be told of."""
FROZEN_SECONDS = 0.02
"""How often an instance that is to end is checked for being frozen."""
SIGNALLED, ZYGOTE_LOST = 128, 70
"""Exit codes: above the first of a process that a signal ended; of an executor without a zygote."""
NODE_FULL, NOT_STARTED = "node_full", "instance_not_started"
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
        self._node = data_dir / NODE
        self._instances = self._node / "instances"
        self._roots = (*settings.template_roots, data_dir / "rootfs")
        self._root = os.geteuid() == 0
        self._layers = layering.Layers(
            self._node / "layers", settings, packages or PackageSettings()
        )
        home = Home(
            str(data_dir.resolve()),
            [str(path) for path in data_directories.lock_files(data_dir)],
            link.unattended_limit.total_seconds(),
        )
        self._nursery = Nursery(link.start_timeout, home)
        self._groups: cgroups.Groups = cgroups.NoGroups()
        self._trees: dict[tuple[str, datetime, int], sandbox.Tree] = {}
        self._kills: dict[str, int] = {}
        self._made: set[str] = set()
        """Instances that were made by this driver's own helper, which tells how they end."""
        self._new: set[str] = set()
        """Instances that nobody has been connected to yet."""
        self._failure: str | None = None
        """Why the last start failed; none when it did not."""
        self._machine = Machine(self._node)
        self.capabilities = Capabilities(frozenset())
        self.environments = LocalEnvironments(
            self._node, root=self._root, tree=self._tree, image=self._image_identity
        )
        self.places = Places(self._node, self._instances, settings, bucket)

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
        trouble = disk_images.image_trouble(self._node)
        self._workspaces = Workspaces(
            self._node / "workspaces", self._settings, images=trouble is None, own_uids=self._root
        )
        self._workspaces.open()
        self.places.open(images=trouble)
        self._groups = cgroups.find_groups(self._settings, self._node)
        self._etc = trees.write_etc(self._node)
        self._executor = executor_bundle.write(self._node)
        self._inside = executor_bundle.write_inside(self._node)
        program = seccomp.program()
        self._seccomp = self._node / "seccomp.bpf"
        if program is not None:
            trees.write_once(self._seccomp, program)
        hidden = [path for path in sandbox.HIDDEN if os.path.exists(path)]
        self._hidden = tuple(f"{path}/" if os.path.isdir(path) else path for path in hidden)
        ground = layering.Ground(
            bubblewrap=bubblewrap,
            groups=self._groups,
            hidden=self._hidden,
            seccomp=None if program is None else self._seccomp,
        )
        self._layers.open(ground, host.layer_trouble(self._node))
        self.environments.open(self._installer(filtered=program is not None))
        provides = set(self._groups.provides)
        if self._root:
            provides.add("own_uid")
        if self._workspaces.images:
            provides.add("disk_quota")
        if program is not None:
            provides.add("seccomp")
        missing = {name: words for name, words in REQUIREMENTS.items() if name not in provides}
        if trouble is not None:
            missing["disk_quota"] += f": {trouble}"
        features = {"pause", "copy"} if self._groups.freezes else {"copy"}
        self.capabilities = Capabilities(frozenset(provides), missing, frozenset(features))

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
            mounts=str(self.places.mounts),
            stage=self._stage if self._root else None,
            images=self._workspaces.images,
        )
        installer = Installer(ground)
        installer.open()
        return installer

    async def close(self) -> None:
        await self._nursery.close()
        await asyncio.to_thread(self._groups.close)

    # Templates

    async def check(self, template: Template) -> None:
        _check_no_image(template)
        missing = [name for name in template.require if name in self.capabilities.missing]
        if missing:
            words = "; ".join(f"{name} ({self.capabilities.missing[name]})" for name in missing)
            raise InvalidRequest(
                f"Template {template.id} demands what this node cannot give: {words}. "
                "`atoll doctor` says what is missing and why.",
                code="isolation_unavailable",
                missing=missing,
            )
        await asyncio.to_thread(trees.check_allowed, template, self._roots)
        if template.layers:
            await asyncio.to_thread(self._layers.check, template.root)
        if await self.built(template):
            # Not what is known of its edition: this one may never come to be stored.
            try:
                tree = await self._new_tree(template)
            except OSError as error:
                raise InvalidRequest(
                    f"{template.root or template.python} cannot be used as a root file system or "
                    f"interpreter: {error.strerror}.",
                    code="place_not_usable",
                    field="image" if template.image else "base_image",
                ) from error
            trees.check_usable(tree)

    async def built(self, template: Template) -> bool:
        return not await asyncio.to_thread(self._layers.missing, template.layers)

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer | None:
        return None

    async def image(self, template: Template) -> ImageInfo | None:
        return None

    @staticmethod
    async def _image_identity(template: Template) -> tuple[str, ...]:
        return trees.identity(template)

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        say: Callable[[bytes], None],
        material: Material = NO_MATERIAL,
    ) -> None:
        found = template.layers
        for layer in await asyncio.to_thread(self._layers.missing, found):
            below = found[: found.index(layer)]
            await self._layers.build(template.root, below, layer, timeout=timeout, say=say)

    async def layers(self) -> list[str]:
        return await asyncio.to_thread(self._layers.names)

    async def discard_layer(self, name: str) -> None:
        await asyncio.to_thread(self._layers.discard, name)

    async def _tree(self, template: Template) -> sandbox.Tree:
        key = template.edition
        if key not in self._trees:
            self._trees[key] = await self._new_tree(template)
        return self._trees[key]

    async def _new_tree(self, template: Template) -> sandbox.Tree:
        return await asyncio.to_thread(
            trees.tree_of,
            template,
            self._etc,
            self._settings.python,
            self._roots,
            tuple(self._layers.place(layer) for layer in reversed(template.layers)),
        )

    # Instances

    async def ensure(self, spec: InstanceSpec) -> Handle:
        try:
            with _translated(spec.instance_id):
                return await self._ensure(spec)
        except TemporaryError as error:
            if error.code in (NODE_FULL, NOT_STARTED):
                self._failure = error.message
            raise

    async def _ensure(self, spec: InstanceSpec) -> Handle:
        found = await asyncio.to_thread(self._stored, spec.instance_id)
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
                await self.discard(spec.instance_id)
            raise

    async def _make(self, spec: InstanceSpec, abandoned: asyncio.Event) -> Handle:
        tree = await self._tree(spec.template)
        waits = self.places.waits_for(spec)
        handle = None
        try:
            workspace = await self.places.run(waits, self._prepare, spec)
            if abandoned.is_set():
                raise asyncio.CancelledError
            pid, child = await self._nursery.spawn(self._request(spec, tree, workspace))
            handle = self._handle(spec, workspace, pid, child)
            await asyncio.to_thread(self._store, handle)
        except BaseException:
            undone = self.places.run(waits, self._give_up, spec.instance_id, handle)
            await asyncio.shield(undone)
            raise
        self._failure = None
        self._made.add(spec.instance_id)
        self._new.add(spec.instance_id)
        return handle

    def _prepare(self, spec: InstanceSpec) -> Workspace:
        directory = self._instances / spec.instance_id
        if directory.exists():
            self._clear(spec.instance_id)
        name = spec.workspace or spec.instance_id
        workspace = self._workspaces.get(name)
        if workspace is not None:
            self._workspaces.repair(workspace)
        elif spec.workspace is None:
            if spec.prefix is not None:
                self.places.make_prefix(spec.prefix)
            workspace = self._workspaces.make(name, spec.resources.disk, spec.prefix)
        else:
            raise WorkspaceLost(f"Workspace {name} is not on this node.")
        directory.mkdir(mode=0o700)
        if spec.callback is not None:
            _write_secret(directory / CALLBACK, json.dumps(asdict(spec.callback)))
        self.places.attach(spec, workspace, views=False)
        self._groups.make(spec.instance_id, spec.resources)
        return workspace

    def _give_up(self, instance_id: str, handle: Handle | None) -> None:
        try:
            if handle is not None:
                self._kill_now(handle)
        finally:
            self._clear(instance_id)

    def _request(
        self, spec: InstanceSpec, tree: sandbox.Tree, workspace: Workspace
    ) -> dict[str, Any]:
        directory = self._instances / spec.instance_id
        path = str(self.places.files(workspace) or self._workspaces.path(workspace))
        binds: dict[str, str] = {}
        stage = self._stage(tree, path) if self._root else None
        unattended = self._link_settings.unattended_grace
        box = sandbox.Sandbox(
            tree=tree,
            executor=str(self._executor),
            inside=str(self._inside),
            workspace=path,
            packages=str(self.environments.place),
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
                (str(self.places.source(volume)), mount.path, mount.read_only)
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
            "mounts": str(self.places.mounts),
            "image": path if workspace.kind == IMAGE else None,
            "owner": workspace.owner,
            "callback": str(directory / CALLBACK) if spec.callback is not None else None,
            "journal": [str(file) for file in self._workspaces.journal(workspace)],
            "ephemeral": spec.ephemeral,
        }

    def _environment(self, template: Template) -> str | None:
        name = template.build.environment if template.build is not None else None
        return None if name is None else self.environments.inside(name)

    @staticmethod
    def _stage(tree: sandbox.Tree, workspace: str) -> str:
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

    def _store(self, handle: Handle) -> None:
        directory = self._instances / handle.instance_id
        temporary = directory / ".handle.json"
        temporary.write_text(json.dumps(asdict(handle)))
        temporary.replace(directory / "handle.json")

    def _stored(self, instance_id: str) -> Handle | None:
        """The handle in an instance's directory; none when there is none that can be used."""
        try:
            return _parse((self._instances / instance_id / "handle.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("instance.handle_damaged", instance_id=instance_id, error=repr(error))
            return None

    async def observe(self, handle: Handle) -> Observation:
        found = self._observe(handle)
        deadline = time.monotonic() + TOLD_SECONDS
        while found.state is State.GONE and self._about_to_be_told(handle):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.002)
            found = self._observe(handle)
        return found

    def _about_to_be_told(self, handle: Handle) -> bool:
        """Whether its bubblewrap is ours and on its way out: how it ended comes in a moment."""
        data = handle.data
        return handle.instance_id in self._made and self._nursery.has(int(data["pid"]))

    def _observe(self, handle: Handle) -> Observation:
        data = handle.data
        same = processes.start_time(int(data["child"])) == data["child_started"]
        if same and data["boot"] == processes.boot_id():
            paused = self._groups.frozen(handle.instance_id)
            return Observation(State.PAUSED if paused else State.RUNNING)
        ended = self._nursery.exits.get(int(data["pid"]))
        killed = self._groups.supervisor_kills(handle.instance_id) > 0
        if ended is None:
            return Observation(State.EXITED, Cause.OOM) if killed else Observation(State.GONE)
        return Observation(State.EXITED, self._cause(handle, ended.status, killed=killed))

    def _cause(self, handle: Handle, status: int, *, killed: bool) -> Cause:
        """From how bubblewrap ended, which tells of its child as a shell does."""
        code = os.waitstatus_to_exitcode(status)
        if code < 0 or code > SIGNALLED:
            return Cause.OOM if killed else Cause.SIGNAL
        # What is left in memory, in files of /tmp say, may leave no room for another zygote.
        starved = code == ZYGOTE_LOST and self._groups.memory_kills(handle.instance_id) > 0
        return Cause.OOM if starved else Cause.EXIT

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
        ended = self._nursery.exits.get(int(handle.data["pid"]))
        if ended is None or not ended.printed:
            return error
        return PermanentError(
            f"Instance {handle.instance_id} ended at its start: {ended.printed}",
            code="instance_failed",
        )

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        workspace = await asyncio.to_thread(self._workspaces.get, str(handle.data["workspace"]))
        if workspace is None or (workspace.kind == IMAGE and workspace.size != resources.disk):
            return False
        if resources.disk > workspace.size:
            return False  # The size of a file is limited for the life of the instance.
        await asyncio.to_thread(self._groups.limit, handle.instance_id, resources)
        return True

    def run_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        limits = {"FSIZE": resources.disk}
        watch: dict[str, int] = {}
        if "cgroup_memory" not in self._groups.provides:
            limits["DATA"] = resources.memory
            watch["memory"] = resources.memory
        else:
            watch["sockets"] = cgroups.uncharged_sockets(resources)
        if "cgroup_pids" not in self._groups.provides:
            # The supervisor and the zygote are of the same user.
            limits["NPROC"] = resources.max_processes + 2
        if not self._workspaces.images:
            watch["disk"] = resources.disk
        return limits, watch

    async def out_of_memory(self, handle: Handle) -> bool:
        kills = self._groups.memory_kills(handle.instance_id)
        before = self._kills.get(handle.instance_id, 0)
        self._kills[handle.instance_id] = kills
        return kills > before

    async def memory_used(self, handle: Handle) -> int | None:
        return self._groups.memory_used(handle.instance_id)

    async def pause(self, handle: Handle) -> None:
        if not self._groups.freezes:
            raise Conflict(
                "Instances of this node cannot be paused: it has no freezer for control groups.",
                code="pause_unavailable",
            )
        if (await self.observe(handle)).state not in (State.RUNNING, State.PAUSED):
            return
        freeze, name = self._groups.freeze, handle.instance_id
        freezing = asyncio.ensure_future(asyncio.to_thread(freeze, name, PAUSE_SECONDS))
        try:
            still = await asyncio.shield(freezing)
        except asyncio.CancelledError:
            # A thread cannot be called back: who resumes it next is not to come before that.
            await asyncio.wait([freezing])
            raise
        if not still and (await self.observe(handle)).state is State.RUNNING:
            raise TemporaryError(
                f"Processes of instance {handle.instance_id} did not come to a standstill in "
                f"{PAUSE_SECONDS:g} s; they go on.",
                code="pause_timeout",
            )

    async def resume(self, handle: Handle) -> None:
        if (await self.observe(handle)).state is State.PAUSED:
            await asyncio.to_thread(self._groups.thaw, handle.instance_id)

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
        await self.places.end(handle.instance_id, self._kill_now, handle)

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
        waits = self.places.waits(handle.instance_id)
        await self.places.run(waits, self._clear, handle.instance_id)
        self._nursery.exits.pop(int(handle.data["pid"]), None)
        self._kills.pop(handle.instance_id, None)
        self._made.discard(handle.instance_id)
        self._new.discard(handle.instance_id)

    def _clear(self, instance_id: str) -> None:
        """Remove groups and directory; processes of an interrupted start go with their groups."""
        deadline = time.monotonic() + 10
        while True:
            try:
                self._groups.remove(instance_id)
                break
            except cgroups.BusyGroup:
                cgroups.kill_all(self._groups, instance_id)
                if time.monotonic() > deadline:
                    raise TemporaryError(
                        f"Processes of instance {instance_id} do not end.", code="instance_stuck"
                    ) from None
                time.sleep(0.002)
        with self.places.detached(instance_id):
            shutil.rmtree(self._instances / instance_id, ignore_errors=True)

    async def discard(self, workspace: str) -> None:
        await asyncio.to_thread(self._workspaces.remove, workspace)

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
        try:
            self._settle(source)
            return self._workspaces.copy(source, name, abandoned)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise TemporaryError(
                f"Workspace {workspace} could not be copied: {error}.",
                code=NODE_FULL if full else "workspace_not_copied",
            ) from error

    def _settle(self, workspace: Workspace) -> None:
        """See to it that all that was written to a workspace is in its files or its image."""
        for handle in self._handles():
            if self.workspace_of(handle) != workspace.name:
                continue
            state = self._observe(handle).state
            if state is State.RUNNING:
                raise TemporaryError(
                    f"Workspace {workspace.name} is in use by instance {handle.instance_id}, which "
                    "does not stand still.",
                    code="workspace_busy",
                )
            if state is State.PAUSED:
                if workspace.kind == IMAGE:
                    processes.sync_files(int(handle.data["child"]), "workspace")
                return
        self._workspaces.wait_until_let_go(workspace)

    # What is there

    async def handles(self) -> list[Handle]:
        try:
            return await asyncio.to_thread(self._handles)
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

    def _handles(self) -> list[Handle]:
        found = []
        groups = self._groups.names()
        directories = {entry.name for entry in os.scandir(self._instances)}
        self._tidy(groups, directories)
        for name in sorted(directories):
            handle = self._stored(name)
            if handle is None:
                # The rest of a start that was interrupted before it had anything to tell, or
                # nobody can read what it told.
                nothing: dict[str, str | int] = {
                    "pid": 0, "started": -1, "child": 0, "child_started": -1, "boot": "",
                    "workspace": name,
                }  # fmt: skip
                handle = Handle(name, self.kind, HANDLE_VERSION, nothing)
            found.append(handle)
        return found

    async def workspaces(self) -> list[str]:
        return await asyncio.to_thread(self._workspaces.names)

    def workspace_of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def health(self) -> str | None:
        return await asyncio.to_thread(self._health)

    def _health(self) -> str | None:
        if not os.access(self._bubblewrap, os.X_OK):
            return f"{self._bubblewrap} is not there any more, or cannot be executed"
        if not os.access(self._instances, os.W_OK | os.X_OK):
            return f"{self._instances} cannot be written to"
        return self._failure

    async def metrics(self) -> NodeMetrics:
        return await asyncio.to_thread(self._machine.metrics)


def _check_no_image(template: Template) -> None:
    given = {
        "dockerfile": bool(template.dockerfile),
        "runtime": bool(template.runtime),
        "registry": template.registry is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidRequest(
                f"{name}: this node has no Docker (ATOLL_DRIVER=docker); give base_image and "
                "packages, or a root file system directory as image.",
                code=f"{name}_unsupported",
                field=name,
            )


def _parse(text: str) -> Handle:
    handle = Handle(**json.loads(text))
    for name in ("pid", "started", "child", "child_started"):
        int(handle.data[name])
    for name in ("boot", "workspace"):
        handle.data[name]
    return handle


@contextlib.contextmanager
def _translated(instance_id: str) -> Iterator[None]:
    """What the host says when it cannot start an instance, as an error of ours."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        said = getattr(error, "stderr", None) or b""
        words = f"{error} {said.decode(errors='replace')[-LOG_TAIL:]}".strip()
        raise TemporaryError(
            f"Instance {instance_id} could not be started: {words}",
            code=NODE_FULL if full else NOT_STARTED,
        ) from error


def _write_secret(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
