"""Containers of a node whose data directory was removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import NOT_THERE, Engine, translated
from atoll.drivers.docker.labels import Label

if TYPE_CHECKING:
    from atoll.settings import DockerSettings


async def containers(settings: DockerSettings, node: str, *, remove: bool) -> int:
    """How many there are, running or not; with `remove`, they are removed."""
    engine = Engine(settings)
    await engine.open()
    try:
        with translated():
            filters = json.dumps({"label": [f"{Label.NODE}={node}"]})
            found = await engine.docker.containers.list(all=1, filters=filters)
            for container in found if remove else ():
                try:
                    await container.delete(force=True, v=True)
                except DockerError as error:
                    if error.status != NOT_THERE:
                        raise
            return len(found)
    finally:
        await engine.close()
