"""The parts of the Docker driver: workspaces, limits, pausing and resizing of its containers."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config, exec_link
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, translated
from atoll.drivers.docker.labels import DiskLimit, Label, LinkKind
from atoll.drivers.shared import cgroups
from atoll.errors import TemporaryError
from atoll.model.instance import State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.drivers.docker.container_memory import ContainerMemory
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.storage import Storage
    from atoll.model.instance import Capabilities, Handle, Observation
    from atoll.model.resources import Resources

    Inspect = Callable[[Handle], Awaitable[tuple[dict[str, Any], Observation]]]
    """The container of a handle, empty if it is gone, and its state."""

CANNOT_UPDATE = "Cannot update container"
"""The engine's message if a container uses more memory than its new limit, with status 500."""

log = structlog.get_logger(__name__)


class DockerWorkspaces:
    def __init__(
        self, storage: Storage, containers: Callable[[str], Awaitable[list[dict[str, Any]]]]
    ) -> None:
        """`containers` lists the node's containers with a label."""
        self._storage = storage
        self._containers = containers

    @property
    def can_copy(self) -> bool:
        return self._storage.copies

    def of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def names(self) -> list[str]:
        return await self._storage.names()

    async def discard(self, name: str) -> None:
        await self._storage.discard(name)

    async def copy(self, name: str, new: str) -> bool:
        for found in await self._containers(f"{Label.WORKSPACE}={name}"):
            if found["State"] == "running":
                raise TemporaryError(
                    f"Workspace {name} is in use by an instance that is not paused.",
                    code="workspace_busy",
                )
        return await self._storage.copy(name, new)


class DockerLimits:
    def __init__(self, capabilities: Capabilities, memory: ContainerMemory) -> None:
        self._provides = capabilities.provides
        self._memory = memory

    def executor_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        # A stored handle may be of an earlier version.
        held = handle.data.get("disk") == DiskLimit.FILE_SYSTEM
        own_uid = handle.data.get("uid", container_config.UID) != container_config.UID
        limits = {"FSIZE": resources.disk}
        watch = {} if held else {"disk": resources.disk}
        if "cgroup_memory" not in self._provides:
            limits["DATA"] = watch["memory"] = resources.memory
        else:
            watch["sockets"] = cgroups.uncharged_sockets(resources)
        if own_uid:
            # The container's own limit leaves room for processes of ours. This one is of user code
            # alone, and counts all processes of the uid.
            limits["NPROC"] = resources.max_processes + container_config.EXECUTOR_PROCESSES
        elif "cgroup_pids" not in self._provides:
            limits["NPROC"] = resources.max_processes + container_config.OWN_PROCESSES
        return limits, watch

    async def out_of_memory(self, handle: Handle) -> bool:
        return await self._memory.killed(handle.instance_id)

    async def memory_used(self, handle: Handle) -> int | None:
        return await self._memory.used(handle.instance_id, str(handle.data["container"]))


class DockerPausing:
    def __init__(self, inspect: Inspect, change: Callable[[str, str], Awaitable[None]]) -> None:
        """`change` posts a verb to the engine; it does nothing if that is done already."""
        self._inspect = inspect
        self._change = change

    async def pause(self, handle: Handle) -> None:
        await self._post(handle, "pause")

    async def resume(self, handle: Handle) -> None:
        await self._post(handle, "unpause")

    async def _post(self, handle: Handle, verb: str) -> None:
        posting = asyncio.ensure_future(self._post_if_needed(handle, verb))
        try:
            await asyncio.shield(posting)
        except asyncio.CancelledError:
            # The engine continues; the opposite request must not overtake this one.
            await asyncio.wait([posting])
            raise

    async def _post_if_needed(self, handle: Handle, verb: str) -> None:
        _, before = await self._inspect(handle)
        if before.state is not (State.RUNNING if verb == "pause" else State.PAUSED):
            return
        await self._change(str(handle.data["container"]), verb)


class DockerResizing:
    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        inspect: Inspect,
        on_resized: Callable[[str], None],
    ) -> None:
        """`on_resized` takes the id of a container."""
        self._engine = engine
        self._storage = storage
        self._inspect = inspect
        self._on_resized = on_resized

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        if not await self._storage.fits(str(handle.data["workspace"]), resources):
            return False
        found, _ = await self._inspect(handle)
        if found and self._engine.is_gvisor(found["HostConfig"].get("Runtime", "")):
            return False  # Its own kernel got its limits when it started.
        container = str(handle.data["container"])
        relays = exec_link.MAX_RELAYS * (handle.data["link"] == LinkKind.RELAY)
        with translated():
            try:
                async with self._engine.query(
                    f"containers/{container}/update",
                    method="POST",
                    data=json.dumps(container_config.limits(resources, relays=relays)),
                ):
                    self._on_resized(container)
                    return True
            except DockerError as error:
                if error.status in (NOT_FOUND, CONFLICT) or CANNOT_UPDATE in str(error.message):
                    log.info(
                        "instance.not_resized", instance_id=handle.instance_id, error=str(error)
                    )
                    return False
                raise
