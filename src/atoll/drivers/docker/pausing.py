"""Pauses and resumes containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.shared.cancellation import run_to_end
from atoll.model.instance import State

if TYPE_CHECKING:
    from atoll.drivers.docker.instance_containers import InstanceContainers
    from atoll.model.instance import Handle


class DockerPausing:
    def __init__(self, containers: InstanceContainers) -> None:
        self._containers = containers

    async def pause(self, handle: Handle) -> None:
        await self._post(handle, "pause")

    async def resume(self, handle: Handle) -> None:
        await self._post(handle, "unpause")

    async def _post(self, handle: Handle, verb: str) -> None:
        # The engine continues after a cancellation; the opposite request must not overtake this.
        await run_to_end(self._post_if_needed(handle, verb))

    async def _post_if_needed(self, handle: Handle, verb: str) -> None:
        _, before = await self._containers.find(handle)
        if before.state is not (State.RUNNING if verb == "pause" else State.PAUSED):
            return
        await self._containers.post(str(handle.data["container"]), verb)
