"""Containers of a node whose data directory was removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.docker.engine import Engine
from atoll.drivers.docker.errors import NOT_FOUND, ignored, translated
from atoll.drivers.docker.labels import Label

if TYPE_CHECKING:
    from atoll.settings import DockerSettings


async def containers(settings: DockerSettings, node: str, *, remove: bool) -> int:
    """The number of the node's containers, running or not; with `remove`, they are removed."""
    engine = Engine(settings)
    await engine.open()
    try:
        with translated():
            found = await engine.containers({"label": [f"{Label.NODE}={node}"]})
            for container in found if remove else ():
                with ignored(NOT_FOUND):
                    await engine.delete_container(container["Id"])
            return len(found)
    finally:
        await engine.close()
