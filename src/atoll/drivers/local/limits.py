"""Limits that the executor of an instance enforces, and its memory use and OOM kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.shared import cgroups

if TYPE_CHECKING:
    from atoll.drivers.shared.workspace_files import WorkspaceFiles
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources


class LocalLimits:
    def __init__(self, groups: cgroups.ControlGroups, workspaces: WorkspaceFiles) -> None:
        self._groups = groups
        self._workspaces = workspaces
        self._kills: dict[str, int] = {}
        """Kills for lack of memory that `out_of_memory` has reported, by instance."""

    def executor_limits(
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
            # The supervisor and the zygote have the same uid.
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

    def forget(self, instance_id: str) -> None:
        self._kills.pop(instance_id, None)
