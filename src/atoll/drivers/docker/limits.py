"""Limits that the executor of a container enforces, and its memory use and OOM kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.docker import container_config
from atoll.drivers.docker.labels import DiskLimit
from atoll.drivers.shared import cgroups

if TYPE_CHECKING:
    from atoll.drivers.docker.container_memory import ContainerMemory
    from atoll.model.instance import Capabilities, Handle
    from atoll.model.resources import Resources


class DockerLimits:
    def __init__(self, capabilities: Capabilities, memory: ContainerMemory) -> None:
        self._provides = capabilities.provides
        self._memory = memory

    def executor_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        # A handle of an earlier version may lack these entries.
        held = handle.data.get("disk") == DiskLimit.FILE_SYSTEM
        own_uid = handle.data.get("uid", container_config.UID) != container_config.UID
        limits = {"FSIZE": resources.disk}
        watch = {} if held else {"disk": resources.disk}
        if "cgroup_memory" not in self._provides:
            limits["DATA"] = watch["memory"] = resources.memory
        else:
            watch["sockets"] = cgroups.uncharged_sockets(resources)
        if own_uid:
            # The container's limit includes processes of Atoll. This one is for user code alone: it
            # counts all processes of the uid.
            limits["NPROC"] = resources.max_processes + container_config.EXECUTOR_PROCESSES
        elif "cgroup_pids" not in self._provides:
            limits["NPROC"] = resources.max_processes + container_config.OWN_PROCESSES
        return limits, watch

    async def out_of_memory(self, handle: Handle) -> bool:
        return await self._memory.killed(handle.instance_id)

    async def memory_used(self, handle: Handle) -> int | None:
        return await self._memory.used(handle.instance_id, str(handle.data["container"]))
