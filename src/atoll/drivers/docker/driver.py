"""
Instances as containers of a Docker engine.

A container is found by its name and its labels, so a control plane that starts again finds all of
them: `handles` asks the engine, not memory. The executor is the container's first process; it is
told what to do on its standard input, says there that it listens, and is reached over its link from
then on. A container is never started a second time: another instance is another container.

What the engine does not say is not guessed: while it cannot be reached, instances are observed as
unknown, and nothing is taken for gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.drivers.base import NodeStatus
from atoll.drivers.docker import container_config, exec_link, portable_interpreter, socket_link
from atoll.drivers.docker.container_memory import ContainerMemory
from atoll.drivers.docker.directory_storage import DirectoryStorage
from atoll.drivers.docker.engine import Engine, close_stream
from atoll.drivers.docker.engine_load import EngineLoad
from atoll.drivers.docker.errors import (
    CONFLICT,
    NOT_FOUND,
    NOT_MODIFIED,
    EngineRefused,
    InterpreterMissing,
    ignored,
    translated,
)
from atoll.drivers.docker.exec_link import ExecLinks
from atoll.drivers.docker.executor_config import ExecutorConfig
from atoll.drivers.docker.installer import Installer
from atoll.drivers.docker.installer_tools import InstallerTools
from atoll.drivers.docker.labels import DiskLimit, Label, LinkKind
from atoll.drivers.docker.parts import (
    DockerLimits,
    DockerPausing,
    DockerResizing,
    DockerWorkspaces,
)
from atoll.drivers.docker.scratch_containers import ScratchContainers
from atoll.drivers.docker.storage_probe import directory_obstacle, image_obstacle
from atoll.drivers.docker.template_images import TemplateImages
from atoll.drivers.docker.volume_storage import VolumeStorage
from atoll.drivers.shared import cgroups, data_directories, seccomp
from atoll.drivers.shared.machine_load import Machine
from atoll.drivers.shared.packages.environments import NodeEnvironments
from atoll.drivers.shared.packages.installation import uv_binary
from atoll.drivers.shared.paths import EXECUTOR
from atoll.drivers.shared.zygote_confinement import Confinement
from atoll.errors import (
    AtollError,
    InstanceNotStarted,
    InvalidRequest,
    NodeFull,
    PermanentError,
    TemporaryError,
)
from atoll.link.errors import LinkLost
from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation, State
from atoll.model.session import Cause
from atoll.model.template import REQUIREMENTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from aiodocker.stream import Stream

    from atoll.drivers.docker.storage import InstanceFiles, Storage
    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.link.client import Link
    from atoll.model.template import Template
    from atoll.settings import DockerSettings, LinkSettings, LocalSettings


NAME, KEY = "docker-name", "docker-key"
"""Files of what the node's containers are labelled with, and of what tokens are made from."""
NO_DIRECTORIES = "its workspaces are volumes of a Docker engine (ATOLL_DOCKER__STORAGE)"
HANDLE_VERSION = 1
REMAPPED_UIDS = range(10_000, 60_000)
"""Where the engine gives users in containers other numbers, it has 65,536 of them, usually."""
READY = b"ready\n"
MOST_SAID = 4000
"""Bytes that are kept of what a container writes before it is ready."""
MAX_BEFORE_READY = 1024 * 1024
"""Bytes that it may write before it is ready."""
SIGNALLED, ZYGOTE_LOST = 128, 70
"""Exit codes: above the first of a process that a signal ended; of an executor without a zygote."""

log = structlog.get_logger(__name__)


class DockerDriver:
    kind = "docker"

    def __init__(
        self,
        data_dir: Path,
        settings: DockerSettings,
        link: LinkSettings,
        local: LocalSettings,
        bucket: Bucket | None = None,
    ) -> None:
        self._settings = settings
        self._link_settings = link
        self._local = local
        self._node = data_dir / data_directories.NODE_DIRECTORY
        self._engine = Engine(settings)
        self._machine = Machine(self._node)
        self._environments = NodeEnvironments(
            self._node, root=os.geteuid() == 0, tree=self._base, image=self._image_identity
        )
        # Made by open(), which finds out what the engine has.
        self.images: TemplateImages
        self.workspaces: DockerWorkspaces
        self.limits: DockerLimits
        self.resizing: DockerResizing
        self.packages: NodeEnvironments[container_config.BaseImage] | None = None
        self.volumes: NodeVolumes | None = None
        self.pausing: DockerPausing | None = None
        self._bucket = bucket
        self._storage: Storage
        """Chosen when the engine is known."""
        self._held: dict[str, Stream] = {}
        """Standard inputs of ephemeral instances: these end with them."""
        self._new: set[str] = set()
        """Instances that nobody has been connected to yet."""
        self._failure: str | None = None
        """Why the last start failed; none when it did not."""
        self.capabilities = Capabilities(frozenset())
        self._filter: bytes | None = None
        """Of system calls: that of local instances, beside the engine's own."""

    async def open(self) -> None:
        await asyncio.to_thread(self._open)
        await self._engine.open()
        self._storage = await self._chosen_storage()
        await self._storage.open()
        self.volumes = self._storage.volumes
        self.images = TemplateImages(self._engine, self._settings, self._name, self._node)
        await self.images.open()
        await self._open_environments()
        self._memory = ContainerMemory(self._engine, self._name, self._local.cgroup_root)
        self._memory.open()
        self._load = EngineLoad(self._engine, self._name)
        self._relays = ExecLinks(self._engine, self._name)
        self.capabilities = self._found_capabilities()
        self.workspaces = DockerWorkspaces(self._storage, self._containers)
        self.limits = DockerLimits(self.capabilities, self._memory)
        self.resizing = DockerResizing(
            self._engine, self._storage, self._looked_at, self._load.forget
        )
        if "pausing" not in self.capabilities.unavailable:
            self.pausing = DockerPausing(self._looked_at, self._post)
        if "seccomp" in self.capabilities.provides:
            self._filter = seccomp.program(self._engine.info.get("Architecture"))

    def _open(self) -> None:
        self._node.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name = _kept(self._node / NAME, lambda: secrets.token_hex(8))
        self._key = bytes.fromhex(_kept(self._node / KEY, lambda: secrets.token_hex(32)))
        data_directories.note_engine(self._node.parent, self._engine.url, self._name)

    async def _chosen_storage(self) -> Storage:
        scratch = ScratchContainers(self._engine, self._name)
        wanted, why = self._settings.storage, "the settings say so"
        if wanted == "auto":
            trouble = await directory_obstacle(self._engine, scratch, self._node)
            wanted = "directories" if trouble is None else "volumes"
            why = trouble or "the engine is here, and sees them"
        log.info("storage.chosen", storage=wanted, why=why)
        if wanted == "volumes":
            self._machine = Machine(Path(self._engine.info["DockerRootDir"]))
            return VolumeStorage(self._engine, scratch, self._name, self._node, self._uids())
        if os.geteuid() != 0:
            raise EngineRefused(
                "Workspaces in directories need root: run Atoll as root, or set "
                "ATOLL_DOCKER__STORAGE=volumes."
            )
        trouble = await image_obstacle(scratch, self._node)
        if trouble is not None:
            log.warning("workspaces.without_quota", why=trouble)
        return DirectoryStorage(
            self._node, self._local, self._bucket, self._environments.place, trouble=trouble
        )

    def _uids(self) -> range:
        """From which workspaces get the uids of their own, as the engine numbers them inside."""
        if self._engine.has_security_option("userns", "rootless"):
            return REMAPPED_UIDS
        return range(self._local.uid_base, self._local.uid_base + self._local.uid_count)

    async def _open_environments(self) -> None:
        uv = await asyncio.to_thread(uv_binary)
        if not isinstance(self._storage, DirectoryStorage):
            return
        self.packages = self._environments
        if uv is None:
            self._environments.open(None)
        else:
            tools = InstallerTools(self._node, uv, self._storage.interpreter)
            installer = Installer(
                self._engine,
                self._settings,
                self._node / "installs",
                self._name,
                tools,
                images=self._storage.quota,
            )
            await installer.open()
            self._environments.open(installer)

    def _found_capabilities(self) -> Capabilities:
        info = self._engine.info
        has = {
            "cgroup_memory": bool(info.get("MemoryLimit")),
            "cgroup_cpu": bool(info.get("CpuCfsQuota")),
            "cgroup_pids": bool(info.get("PidsLimit")),
            "seccomp": self._engine.has_security_option("seccomp"),
            "disk_quota": self._storage.quota,
            "own_uid": True,
        }
        missing = {name: words for name, words in REQUIREMENTS.items() if not has[name]}
        provides = frozenset(name for name, there in has.items() if there)
        unavailable = {}
        if info.get("CgroupDriver") == "none":
            unavailable["pausing"] = "the engine has no control groups"
        if self.packages is None:
            unavailable["packages"] = NO_DIRECTORIES
        if self.volumes is None:
            unavailable["volumes"] = NO_DIRECTORIES
        return Capabilities(provides, missing, unavailable)

    async def close(self) -> None:
        for stream in self._held.values():
            await close_stream(stream)
        for name in ("_memory", "_relays"):
            if hasattr(self, name):
                await getattr(self, name).close()
        if hasattr(self, "_storage"):
            await asyncio.to_thread(self._storage.close)
        await self._engine.close()

    # Templates

    async def check(self, template: Template) -> None:
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
            return await self._ensure(spec)
        except (NodeFull, InstanceNotStarted) as error:
            # Other errors concern one template or volume, or `health` asks for them each time.
            self._failure = error.message
            raise

    async def _ensure(self, spec: InstanceSpec) -> Handle:
        found = await self._inspect(_name(spec.instance_id))
        if found is not None:
            handle = self._handle(found)
            if _observed(found).state in (State.RUNNING, State.PAUSED) and self._is_usable(found):
                return handle
            await self.destroy(handle)
        making = asyncio.ensure_future(self._make(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # What the engine is at cannot be called back. It comes to its end, so that it does not
            # run beside the next call, and what it made goes.
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                handle = making.result()
                await self.destroy(handle)
                if spec.workspace is None and spec.prefix is None:
                    await self.workspaces.discard(self.workspaces.of(handle))
            raise

    def _is_usable(self, found: dict[str, Any]) -> bool:
        """Whether it came so far that it was told what to do."""
        labels = found["Config"]["Labels"]
        if labels.get(Label.LINK) == LinkKind.RELAY:
            return True  # One that was not told has ended: its standard input did.
        directory = self._storage.socket(labels[Label.INSTANCE])
        return directory is not None and (directory / socket_link.SOCKET_FILE).exists()

    async def _make(self, spec: InstanceSpec) -> Handle:
        name = _name(spec.instance_id)
        try:
            base = await self._base(spec.template)
            wanted = self._container(spec, base, await self._storage.prepare(spec))
            with translated():
                made = await self._engine.docker.containers.create(
                    container_config.instance_body(wanted), name=name
                )
            await self._start(spec, made.id, wanted)
            found = await self._inspect(made.id)
            if found is None:
                raise InstanceNotStarted(f"Container {name} is gone.")
        except BaseException:
            await asyncio.shield(self._give_up(spec.instance_id))
            raise
        self._failure = None
        self._memory.add(spec.instance_id, found["Id"], int(found["State"]["Pid"]))
        self._new.add(spec.instance_id)
        return self._handle(found)

    async def _give_up(self, instance_id: str) -> None:
        stream = self._held.pop(instance_id, None)
        if stream is not None:
            await close_stream(stream)
        try:
            await self._remove(instance_id)
            await self._storage.clear(instance_id)
        except AtollError as error:
            # Recovery finds it: the next call of `ensure` or `destroy` removes it.
            log.warning("instance.rest_stays", instance_id=instance_id, error=error.message)

    async def _image_identity(self, template: Template) -> tuple[str, ...]:
        return await self.images.identity(template)

    async def _base(self, template: Template) -> container_config.BaseImage:
        image = await self.images.find(template)
        path = image.env.get("PATH", container_config.PATH)
        runtime = template.runtime or self._settings.runtime
        own_kernel = self._engine.is_gvisor(runtime)
        python = await self.images.python(template)
        if python is not None:
            return container_config.BaseImage(
                image.id, (python,), python, path, runtime, own_kernel, volumes=image.volumes
            )
        if template.python:
            raise InterpreterMissing(
                f"The image of template {template.id} has no {template.python}, which the template "
                "names as its interpreter."
            )
        return container_config.BaseImage(
            image.id,
            portable_interpreter.command(),
            f"{portable_interpreter.PLACE}/bin/python3",
            f"{path}:{portable_interpreter.PLACE}/bin",
            runtime,
            own_kernel,
            (await self._storage.interpreter(),),
            image.volumes,
        )

    def _container(
        self, spec: InstanceSpec, base: container_config.BaseImage, prepared: InstanceFiles
    ) -> container_config.ContainerSpec:
        relayed = base.own_kernel or self._storage.socket(spec.instance_id) is None
        labels: dict[str, str] = {
            Label.NODE: self._name,
            Label.INSTANCE: spec.instance_id,
            Label.WORKSPACE: spec.workspace or spec.instance_id,
            Label.LINK: LinkKind.RELAY if relayed else LinkKind.SOCKET,
            Label.UID: str(prepared.uid),
            Label.DISK: DiskLimit.FILE_SYSTEM if prepared.size_is_limited else DiskLimit.EXECUTOR,
        }
        return container_config.ContainerSpec(
            base=base,
            labels=labels,
            mounts=tuple(prepared.mounts),
            resources=spec.resources,
            uid=prepared.uid,
            relays=exec_link.MAX_RELAYS if relayed else 0,
            environment=self._environment(spec.template),
            tmp_size=self._settings.tmp_size,
            open_files=self._settings.open_files,
        )

    def _environment(self, template: Template) -> str | None:
        name = template.build.environment if template.build is not None else None
        return None if name is None else self._environments.inside(name)

    async def _start(
        self, spec: InstanceSpec, container_id: str, wanted: container_config.ContainerSpec
    ) -> None:
        """Start the container, tell its executor what to do, and wait until that is ready."""
        unattended = self._link_settings.unattended_grace
        config = ExecutorConfig(
            token=self._token(spec.instance_id),
            listen=f"\0{exec_link.SOCKET_NAME}"
            if wanted.relays
            else f"{container_config.LINK}/{socket_link.SOCKET_FILE}",
            peer=exec_link.RELAY_UID if wanted.relays else None,
            journal=tuple(
                f"{container_config.JOURNAL}/{number}"
                for number in (0, 1)
                if self._storage.journals
            ),
            preload=spec.template.preload,
            packages=wanted.environment or "",
            ephemeral=spec.ephemeral,
            unattended=None if spec.ephemeral else unattended.total_seconds(),
            seccomp="" if self._filter is None else self._filter.hex(),
        )
        container = self._engine.docker.containers.container(container_id)
        stream = container.attach(stdin=True, stdout=True, stderr=True)
        patience = self._link_settings.start_timeout
        deadline = asyncio.get_running_loop().time() + patience.total_seconds()
        try:
            with translated():
                async with asyncio.timeout_at(deadline):
                    # Attached first: nothing of what it writes is missed.
                    await stream._init()
                    await container.start()
                    await stream.write_in(config.line())
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._await_ready(spec.instance_id, stream)
                except TimeoutError:
                    # Not the engine's fault: another node would not do better with this image.
                    raise LinkLost(
                        f"The executor of instance {spec.instance_id} did not answer in {patience}."
                    ) from None
        except BaseException:
            await close_stream(stream)
            raise
        if spec.ephemeral:
            self._held[spec.instance_id] = stream
        else:
            await close_stream(stream)

    async def _await_ready(self, instance_id: str, stream: Stream) -> None:
        said, size = b"", 0
        while (message := await stream.read_out()) is not None:
            if message.stream == 1 and message.data == READY:
                return
            said = (said + message.data)[-MOST_SAID:]
            size += len(message.data)
            if size > MAX_BEFORE_READY:
                raise PermanentError(
                    f"Instance {instance_id} wrote over {MAX_BEFORE_READY} bytes before it was "
                    "ready.",
                    code="instance_failed",
                )
        # Of an engine that hung up this is not known, and asking it says so.
        with ignored(NOT_FOUND, CONFLICT, NOT_MODIFIED):
            await self._engine.call("POST", f"containers/{_name(instance_id)}/wait")
        words = said.decode(errors="replace").strip()
        raise PermanentError(
            f"Instance {instance_id} ended at its start: {words or 'it said nothing'}",
            code="instance_failed",
        )

    def _token(self, instance_id: str) -> str:
        """Made anew from what the node keeps: no record has it."""
        return hmac.new(self._key, instance_id.encode(), hashlib.sha256).hexdigest()

    def _handle(self, found: dict[str, Any]) -> Handle:
        labels = found["Config"]["Labels"]
        return self._handle_of(found["Id"], labels)

    def _handle_of(self, container_id: str, labels: dict[str, str]) -> Handle:
        data: dict[str, str | int] = {
            "container": container_id,
            "workspace": labels.get(Label.WORKSPACE, labels[Label.INSTANCE]),
            "link": labels.get(Label.LINK, ""),
            # Containers of earlier versions have neither.
            "uid": int(labels.get(Label.UID, container_config.UID)),
            "disk": labels.get(Label.DISK, DiskLimit.EXECUTOR),
        }
        return Handle(labels[Label.INSTANCE], self.kind, HANDLE_VERSION, data)

    # What it is like

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        """A container; none when it is not there, or of another node on this engine."""
        with translated():
            found = await self._engine.inspect(name)
        if found is None or (found["Config"]["Labels"] or {}).get(Label.NODE) != self._name:
            return None
        return found

    async def observe(self, handle: Handle) -> Observation:
        try:
            return (await self._looked_at(handle))[1]
        except TemporaryError as error:
            log.info("instance.not_observed", instance_id=handle.instance_id, error=error.message)
            return Observation(State.UNKNOWN)

    async def _looked_at(self, handle: Handle) -> tuple[dict[str, Any], Observation]:
        found = await self._inspect(_name(handle.instance_id))
        if found is None or found["Id"] != handle.data["container"]:
            return {}, Observation(State.GONE)
        return found, _observed(found)

    async def connect(self, handle: Handle) -> Link:
        try:
            found, observed = await self._looked_at(handle)
        except TemporaryError as error:
            raise LinkLost(
                f"Instance {handle.instance_id} cannot be reached. {error.message}"
            ) from error
        if observed.state is not State.RUNNING:
            raise LinkLost(f"Instance {handle.instance_id} is {observed.state.value}.")
        # Another driver may have made it.
        self._memory.add(handle.instance_id, found["Id"], int(found["State"]["Pid"]))
        link = await self._link(handle, found["Config"]["Entrypoint"])
        try:
            # Before any user code runs, and each time: whoever did it last may not have come to it.
            await self._storage.seal(handle.instance_id, self.workspaces.of(handle))
            failed = await Confinement(cgroups.NoControlGroups(), handle.instance_id, link).settle()
            if failed:
                words = "; ".join(f"{name}: {why}" for name, why in failed.items())
                raise PermanentError(f"Preloading failed: {words}", code="preload_failed")
        except BaseException:
            link.close()
            raise
        self._new.discard(handle.instance_id)
        return link

    async def _link(self, handle: Handle, entry: list[str]) -> Link:
        settings = self._link_settings
        new = handle.instance_id in self._new
        timeout = settings.start_timeout if new else settings.connect_timeout
        token = self._token(handle.instance_id)
        directory = self._storage.socket(handle.instance_id)
        if handle.data["link"] == LinkKind.SOCKET and directory is not None:
            return await socket_link.connect(directory, settings, timeout=timeout, token=token)
        return await self._relays.connect(
            str(handle.data["container"]),
            entry[: entry.index("-I")],
            EXECUTOR,
            settings,
            timeout=timeout,
            token=token,
        )

    async def _post(self, container: str, verb: str) -> None:
        """Nothing happens if the container is in that state already, or gone."""
        with translated(), ignored(NOT_FOUND, CONFLICT, NOT_MODIFIED):
            await self._engine.call("POST", f"containers/{container}/{verb}")

    # The end

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        found, observed = await self._looked_at(handle)
        if not found:
            return
        if grace and observed.state is State.RUNNING:
            # Whatever keeps it from ending by itself, the kernel does not ask.
            with contextlib.suppress(AtollError, TimeoutError):
                async with asyncio.timeout(grace.total_seconds()):
                    link = await self.connect(handle)
                    try:
                        await link.call("shutdown")
                        await link.closed
                    finally:
                        link.close()
        await self._thaw(found)
        for verb in ("kill", "wait"):
            await self._post(found["Id"], verb)

    async def _thaw(self, found: dict[str, Any]) -> None:
        """
        Before it is killed. Another kernel is not ended by the engine while it stands still, but
        ten seconds later, if at all; with the host's the engine itself kills first and thaws then.
        """
        if found["State"]["Paused"] and self._engine.is_gvisor(
            found["HostConfig"].get("Runtime", "")
        ):
            await self._post(found["Id"], "unpause")

    async def destroy(self, handle: Handle) -> None:
        await self._remove(handle.instance_id)
        stream = self._held.pop(handle.instance_id, None)
        if stream is not None:
            await close_stream(stream)
        await self._storage.clear(handle.instance_id)
        self._memory.forget(handle.instance_id)
        self._new.discard(handle.instance_id)

    async def _remove(self, instance_id: str) -> None:
        """The container with whatever runs in it, if it is ours, and until it is gone."""
        while (found := await self._inspect(_name(instance_id))) is not None:
            await self._thaw(found)
            await self._engine.remove(found["Id"])

    # What is there

    async def _containers(self, *labels: str) -> list[dict[str, Any]]:
        wanted = [f"{Label.NODE}={self._name}", *labels]
        with translated():
            found = await self._engine.containers({"label": wanted})
        return [container for container in found if _is_instance(container)]

    async def handles(self) -> list[Handle]:
        # Before the rest: what is made meanwhile is not to be forgotten.
        known = self._memory.instances() | self._new
        # Before the containers: a directory is made first and removed last.
        names = await self._storage.instances()
        found = {
            handle.instance_id: handle
            for one in await self._containers()
            for handle in (self._handle_of(one["Id"], one["Labels"]),)
        }
        for name in names:
            if name not in found and ids.is_instance_id(name):
                # The rest of a start that was interrupted.
                nothing: dict[str, str | int] = {
                    "container": "", "workspace": name, "link": LinkKind.SOCKET,
                    "uid": container_config.UID, "disk": DiskLimit.EXECUTOR,
                }  # fmt: skip
                found[name] = Handle(name, self.kind, HANDLE_VERSION, nothing)
        for name in known - found.keys():
            # Another control plane of this node has destroyed it.
            self._memory.forget(name)
            self._new.discard(name)
        return [found[name] for name in sorted(found)]

    async def status(self) -> NodeStatus:
        problem = await self._engine.ping() or self._failure
        if self._engine.is_local:
            load = await asyncio.to_thread(self._machine.metrics)
        else:
            load = await self._load.metrics()
        return NodeStatus(problem, load)


def _name(instance_id: str) -> str:
    return f"atoll-{instance_id}"


def _is_instance(listed: dict[str, Any]) -> bool:
    """By its name, which is ours to give: labels come with an image, too."""
    instance_id = listed["Labels"].get(Label.INSTANCE, "")
    return ids.is_instance_id(instance_id) and f"/{_name(instance_id)}" in (listed["Names"] or ())


def _observed(found: dict[str, Any]) -> Observation:
    """From what the engine tells of a container."""
    state = found["State"]
    status, code = state["Status"], int(state.get("ExitCode") or 0)
    if status == "running":
        return Observation(State.RUNNING)
    if status == "paused":
        return Observation(State.PAUSED)
    if status == "removing":
        return Observation(State.GONE)
    if status == "restarting":
        return Observation(State.UNKNOWN)
    if status == "created":
        # It never ran, or the engine could not start it.
        return Observation(State.EXITED)
    if state.get("OOMKilled") and (code > SIGNALLED or code == ZYGOTE_LOST):
        return Observation(State.EXITED, Cause.OOM)
    return Observation(State.EXITED, Cause.SIGNAL if code > SIGNALLED else Cause.EXIT)


def _kept(path: Path, make: Callable[[], str]) -> str:
    """A secret of the node, made by whoever comes first, whole."""
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(make())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text()
