"""Images (for now)."""

from __future__ import annotations

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
        return Image(found["Id"], env)

    async def python(self, image: Image, wanted: str) -> str | None:
        with translated():
            made = await self._engine.docker.containers.create(
                {"Image": image.id, "Entrypoint": ["-"], "HostConfig": {"NetworkMode": "none"}}
            )
            try:
                path = wanted or "/usr/local/bin/python3"
                async with self._engine.docker._query(
                    f"containers/{made.id}/archive", method="HEAD", params={"path": path}
                ):
                    return path
            except ValueError:  # An error without a body.
                return None
            finally:
                await made.delete(force=True)
