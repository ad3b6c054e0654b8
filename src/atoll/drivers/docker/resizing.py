"""Changes the limits of running containers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config, exec_link
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, translated
from atoll.drivers.docker.labels import LinkKind

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.engine_load import EngineLoad
    from atoll.drivers.docker.instance_containers import InstanceContainers
    from atoll.drivers.docker.storage import Storage
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources

CANNOT_UPDATE = "Cannot update container"
"""The engine's message if a container uses more memory than its new limit, with status 500."""

log = structlog.get_logger(__name__)


class DockerResizing:
    def __init__(
        self, engine: Engine, storage: Storage, containers: InstanceContainers, load: EngineLoad
    ) -> None:
        self._engine = engine
        self._storage = storage
        self._containers = containers
        self._load = load

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        if not await self._storage.fits(str(handle.data["workspace"]), resources):
            return False
        found, _ = await self._containers.find(handle)
        if found and self._engine.is_gvisor(found["HostConfig"].get("Runtime", "")):
            return False  # Its own kernel got its limits when it started.
        container = str(handle.data["container"])
        relays = exec_link.MAX_RELAYS * (handle.data["link"] == LinkKind.RELAY)
        limits = json.dumps(container_config.limits(resources, relays=relays))
        with translated():
            try:
                await self._engine.call("POST", f"containers/{container}/update", data=limits)
            except DockerError as error:
                if error.status in (NOT_FOUND, CONFLICT) or CANNOT_UPDATE in str(error.message):
                    log.info(
                        "instance.not_resized", instance_id=handle.instance_id, error=str(error)
                    )
                    return False
                raise
        self._load.forget(container)
        return True
