"""Images (for now)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import translated

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine
    from atoll.settings import DockerSettings


@dataclass(frozen=True)
class Image:
    id: str
    env: dict[str, str] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()
    """Paths for which it wants volumes."""


class Images:
    def __init__(self, engine: Engine, settings: DockerSettings) -> None:
        self._engine = engine

    async def find(self, reference: str) -> Image | None:
        with translated():
            try:
                found: dict[str, Any] = await self._engine.docker.images.inspect(reference)
            except DockerError as error:
                if error.status == 404:
                    return None
                raise
        env = dict(line.split("=", 1) for line in found["Config"]["Env"] or [])
        return Image(found["Id"], env, tuple(found["Config"]["Volumes"] or ()))

    async def python(self, image: Image, wanted: str) -> str | None:
        await asyncio.sleep(0)
        return wanted or "/usr/local/bin/python3"
