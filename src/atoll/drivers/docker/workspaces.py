"""Workspaces of a Docker node: listed, copied and discarded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.docker.labels import Label
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from atoll.drivers.docker.instance_containers import InstanceContainers
    from atoll.drivers.docker.storage import Storage
    from atoll.model.instance import Handle


class DockerWorkspaces:
    outlive_instances = True

    def __init__(self, storage: Storage, containers: InstanceContainers) -> None:
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
        for found in await self._containers.list(f"{Label.WORKSPACE}={name}"):
            if found["State"] == "running":
                raise TemporaryError(
                    f"Workspace {name} is in use by an instance that is not paused.",
                    code="workspace_busy",
                )
        return await self._storage.copy(name, new)
