"""
Instances as containers of a Docker engine.

The executor is the first process of a container. It reads its configuration from standard input,
reports there that it is ready, and is reached over its link from then on. The engine is the record
of what exists. While the engine does not answer, instances are observed as unknown, never as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.drivers.base import NodeStatus
from atoll.drivers.docker import container_config, container_start, node_identity, socket_link
from atoll.drivers.docker.capabilities import find_capabilities
from atoll.drivers.docker.container_memory import ContainerMemory
from atoll.drivers.docker.container_specs import ContainerSpecs
from atoll.drivers.docker.directory_storage import DirectoryStorage
from atoll.drivers.docker.engine import Engine, close_stream
from atoll.drivers.docker.engine_load import EngineLoad
from atoll.drivers.docker.errors import EngineRefused, translated
from atoll.drivers.docker.exec_link import ExecLinks
from atoll.drivers.docker.images import DockerImages
from atoll.drivers.docker.installer import Installer
from atoll.drivers.docker.installer_tools import InstallerTools
from atoll.drivers.docker.instance_containers import (
    KIND,
    InstanceContainers,
    container_name,
    handle_of,
    handle_without_container,
    observation,
)
from atoll.drivers.docker.instance_links import InstanceLinks
from atoll.drivers.docker.labels import Label, LinkKind
from atoll.drivers.docker.limits import DockerLimits
from atoll.drivers.docker.pausing import DockerPausing
from atoll.drivers.docker.resizing import DockerResizing
from atoll.drivers.docker.scratch_containers import ScratchContainers
from atoll.drivers.docker.storage_probe import directory_obstacle, image_obstacle
from atoll.drivers.docker.volume_storage import VolumeStorage
from atoll.drivers.docker.workspaces import DockerWorkspaces
from atoll.drivers.shared import data_directories, seccomp
from atoll.drivers.shared.executor_links import shut_down
from atoll.drivers.shared.machine_load import MachineLoad
from atoll.drivers.shared.packages.environments import NodeEnvironments
from atoll.drivers.shared.packages.installation import uv_binary
from atoll.drivers.shared.requirements import check_requirements
from atoll.drivers.shared.uids import uid_range
from atoll.errors import AtollError, InstanceNotStarted, NodeFull, TemporaryError
from atoll.link.errors import LinkLost
from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation, State

if TYPE_CHECKING:
    from datetime import timedelta

    from aiodocker.stream import Stream

    from atoll.drivers.docker.container_config import BaseImage
    from atoll.drivers.docker.storage import Storage
    from atoll.drivers.shared.volumes.bucket_mounts import Bucket
    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.link.client import Link
    from atoll.model.template import Template
    from atoll.settings import DockerSettings, LinkSettings, LocalSettings


REMAPPED_UIDS = range(10_000, 60_000)
"""For an engine that maps user ids: it usually has 65,536 of them."""

log = structlog.get_logger(__name__)


class DockerDriver:
    kind = KIND
    disruptions = None
    ownership = None

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
        self._machine = MachineLoad(self._node)
        self._environments = NodeEnvironments(
            self._node, root=os.geteuid() == 0, tree=self._base, image=self._image_identity
        )
        self._bucket = bucket
        self._stdin: dict[str, Stream] = {}
        """Standard streams of ephemeral instances, which end with them."""
        self._failure: str | None = None
        """Why the last start failed; null if it did not."""
        self._resources = contextlib.AsyncExitStack()
        # Made by open(), which finds out what the engine supports.
        self.capabilities = Capabilities(frozenset())
        self.images: DockerImages
        self.workspaces: DockerWorkspaces
        self.limits: DockerLimits
        self.resizing: DockerResizing
        self.packages: NodeEnvironments[BaseImage] | None = None
        self.volumes: NodeVolumes | None = None
        self.pausing: DockerPausing | None = None
        self._storage: Storage
        self._specs: ContainerSpecs
        self._containers: InstanceContainers
        self._links: InstanceLinks

    async def open(self) -> None:
        self._identity = await asyncio.to_thread(self._open_directory)
        name = self._identity.name
        self._resources.push_async_callback(self._engine.close)
        await self._engine.open()
        self._storage = await self._choose_storage()
        self._resources.push_async_callback(asyncio.to_thread, self._storage.close)
        await self._storage.open()
        self.images = DockerImages(self._engine, self._settings, name, self._node)
        await self.images.open()
        await self._open_environments()
        self._exec_links = ExecLinks(self._engine, name)
        self._resources.push_async_callback(self._exec_links.close)
        self._memory = ContainerMemory(self._engine, name, self._local.cgroup_root)
        self._resources.push_async_callback(self._memory.close)
        self._memory.open()
        self._load = EngineLoad(self._engine, name)
        self._containers = InstanceContainers(self._engine, name)
        self._links = InstanceLinks(
            self._identity, self._storage, self._exec_links, self._link_settings
        )
        self._resources.callback(self._links.close)
        self._open_parts()

    def _open_directory(self) -> node_identity.NodeIdentity:
        self._node.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = node_identity.load(self._node)
        data_directories.note_engine(self._node.parent, self._engine.url, identity.name)
        return identity

    def _open_parts(self) -> None:
        self.volumes = self._storage.volumes
        self.capabilities = find_capabilities(
            self._engine, self._storage, packages=self.packages is not None
        )
        self.workspaces = DockerWorkspaces(self._storage, self._containers)
        self.limits = DockerLimits(self.capabilities, self._memory)
        self.resizing = DockerResizing(self._engine, self._storage, self._containers, self._load)
        if "pausing" not in self.capabilities.unavailable:
            self.pausing = DockerPausing(self._containers)
        filters = seccomp.programs() if "seccomp" in self.capabilities.provides else {}
        self._specs = ContainerSpecs(
            self._engine,
            self._identity,
            self._settings,
            self._storage,
            self.images,
            self._link_settings.unattended_grace,
            filters,
        )

    async def _choose_storage(self) -> Storage:
        name = self._identity.name
        scratch = ScratchContainers(self._engine, name)
        chosen, reason = self._settings.storage, "set by ATOLL_DOCKER__STORAGE"
        if chosen == "auto":
            obstacle = await directory_obstacle(self._engine, scratch, self._node)
            chosen = "directories" if obstacle is None else "volumes"
            reason = obstacle or "the engine sees directories of this machine"
        log.info("storage.selected", storage=chosen, why=reason)
        if chosen == "volumes":
            self._machine = MachineLoad(Path(self._engine.info["DockerRootDir"]))
            return VolumeStorage(self._engine, scratch, name, self._node, self._uids())
        if os.geteuid() != 0:
            raise EngineRefused(
                "Workspaces in directories need root: run Atoll as root, or set "
                "ATOLL_DOCKER__STORAGE=volumes."
            )
        obstacle = await image_obstacle(scratch, self._node)
        if obstacle is not None:
            log.warning("workspaces.without_quota", why=obstacle)
        return DirectoryStorage(
            self._node, self._local, self._bucket, self._environments.directory, obstacle=obstacle
        )

    def _uids(self) -> range:
        """The uids of workspaces in volumes, as seen inside containers."""
        if self._engine.has_security_option("userns", "rootless"):
            return REMAPPED_UIDS
        return uid_range(self._local)

    async def _open_environments(self) -> None:
        if not isinstance(self._storage, DirectoryStorage):
            return
        self.packages = self._environments
        uv = await asyncio.to_thread(uv_binary)
        if uv is None:
            self._environments.open(None)
            return
        installer = Installer(
            self._engine,
            self._settings,
            self._node / "installs",
            self._identity.name,
            InstallerTools(self._node, uv, self._storage.interpreter),
            images=self._storage.quota,
        )
        await installer.open()
        self._environments.open(installer)

    async def close(self) -> None:
        for stream in self._stdin.values():
            await close_stream(stream)
        await self._resources.aclose()

    async def status(self) -> NodeStatus:
        problem = await self._engine.ping() or self._failure
        if self._engine.is_local:
            load = await asyncio.to_thread(self._machine.metrics)
        else:
            load = await self._load.metrics()
        return NodeStatus(problem, load)

    # Templates

    async def check(self, template: Template) -> None:
        check_requirements(template, self.capabilities)
        await self.images.check(template)

    async def _base(self, template: Template) -> BaseImage:
        return await self._specs.base(template)

    async def _image_identity(self, template: Template) -> tuple[str, ...]:
        return await self.images.identity(template)

    # Making instances

    async def ensure(self, spec: InstanceSpec) -> Handle:
        try:
            return await self._ensure(spec)
        except (NodeFull, InstanceNotStarted) as error:
            # Other errors concern one template or volume, or `status` checks for them each time.
            self._failure = error.message
            raise

    async def _ensure(self, spec: InstanceSpec) -> Handle:
        found = await self._containers.inspect(spec.instance_id)
        if found is not None:
            handle = handle_of(found["Id"], found["Config"]["Labels"])
            state = observation(found).state
            if state in (State.RUNNING, State.PAUSED) and self._is_configured(found):
                return handle
            await self.destroy(handle)
        making = asyncio.ensure_future(self._make(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The engine would continue while the next call runs. Wait for it, then remove the
            # result.
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                handle = making.result()
                await self.destroy(handle)
                if spec.workspace is None and spec.prefix is None:
                    await self.workspaces.discard(self.workspaces.of(handle))
            raise

    def _is_configured(self, inspected: dict[str, Any]) -> bool:
        """Whether its executor has received its configuration."""
        labels = inspected["Config"]["Labels"]
        if labels.get(Label.LINK) == LinkKind.RELAY:
            return True  # Without configuration it has ended, because its standard input has.
        directory = self._storage.socket(labels[Label.INSTANCE])
        return directory is not None and (directory / socket_link.SOCKET_FILE).exists()

    async def _make(self, spec: InstanceSpec) -> Handle:
        instance_id, name = spec.instance_id, container_name(spec.instance_id)
        try:
            base = await self._specs.base(spec.template)
            files = await self._storage.prepare(spec)
            container = self._specs.container(spec, base, files, self._environment(spec.template))
            with translated():
                created = await self._engine.docker.containers.create(
                    container_config.instance_body(container), name=name
                )

            def started() -> None:
                if container.relays:
                    self._links.start_relay(instance_id, created.id, base.python)

            stream = await container_start.start(
                self._engine,
                instance_id,
                created.id,
                self._specs.executor(spec, container),
                self._link_settings.start_timeout,
                started,
            )
            if spec.ephemeral:
                self._stdin[instance_id] = stream
            else:
                await close_stream(stream)
            found = await self._containers.inspect(instance_id)
            if found is None:
                raise InstanceNotStarted(f"Container {name} was removed while it started.")
        except BaseException:
            await asyncio.shield(self._undo(instance_id))
            raise
        self._failure = None
        self._memory.add(instance_id, found["Id"], int(found["State"]["Pid"]))
        self._links.add_new(instance_id)
        return handle_of(found["Id"], found["Config"]["Labels"])

    def _environment(self, template: Template) -> str | None:
        name = template.build.environment if template.build is not None else None
        return None if name is None else self._environments.inside(name)

    async def _undo(self, instance_id: str) -> None:
        self._links.forget(instance_id)
        await self._close_stdin(instance_id)
        try:
            await self._containers.remove(instance_id)
            await self._storage.clear(instance_id)
        except AtollError as error:
            # Recovery calls `ensure` or `destroy`, which removes it.
            log.warning("instance.not_removed", instance_id=instance_id, error=error.message)

    # Existing instances

    async def observe(self, handle: Handle) -> Observation:
        try:
            return (await self._containers.find(handle))[1]
        except TemporaryError as error:
            log.info("instance.not_observed", instance_id=handle.instance_id, error=error.message)
            return Observation(State.UNKNOWN)

    async def connect(self, handle: Handle) -> Link:
        try:
            found, observed = await self._containers.find(handle)
        except TemporaryError as error:
            raise LinkLost(
                f"Cannot reach instance {handle.instance_id}. {error.message}"
            ) from error
        if observed.state is not State.RUNNING:
            raise LinkLost(f"Instance {handle.instance_id} is {observed.state.value}.")
        # Another replica may have made it.
        self._memory.add(handle.instance_id, found["Id"], int(found["State"]["Pid"]))
        return await self._links.open(handle, found)

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        found, observed = await self._containers.find(handle)
        if not found:
            return
        if grace and observed.state is State.RUNNING:
            await shut_down(self.connect(handle), grace)
        await self._containers.prepare_to_kill(found)
        for verb in ("kill", "wait"):
            await self._containers.post(found["Id"], verb)

    async def destroy(self, handle: Handle) -> None:
        await self._containers.remove(handle.instance_id)
        await self._close_stdin(handle.instance_id)
        await self._storage.clear(handle.instance_id)
        self._forget(handle.instance_id)

    async def _close_stdin(self, instance_id: str) -> None:
        stream = self._stdin.pop(instance_id, None)
        if stream is not None:
            await close_stream(stream)

    def _forget(self, instance_id: str) -> None:
        self._memory.forget(instance_id)
        self._links.forget(instance_id)

    async def handles(self) -> list[Handle]:
        # Read first: an instance that is made meanwhile must not be forgotten below.
        known = self._memory.instances() | self._links.new_instances()
        # Read before the containers: the files of an instance are made first and removed last.
        names = await self._storage.instances()
        found = {}
        for container in await self._containers.list():
            handle = handle_of(container["Id"], container["Labels"])
            found[handle.instance_id] = handle
        for name in names:
            if name not in found and ids.is_instance_id(name):
                found[name] = handle_without_container(name)
        for name in known - found.keys():
            # Another replica of this node has destroyed it.
            self._forget(name)
        return [found[name] for name in sorted(found)]
