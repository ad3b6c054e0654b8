"""
Images that an engine has, and the names that Atoll gives them.

Each image that Atoll needs gets a name of the node's own, `atoll/<node>:<name>`. Therefore neither
a moved tag nor `docker image prune` removes it, and Atoll knows which images it may remove.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, ignored, translated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.drivers.docker.engine import Engine

CACHE_SECONDS = 1.0
"""How long the image of a name is cached: a tag can move."""
MAX_CACHED = 1000
NAMESPACE = "atoll"


@dataclass(frozen=True, slots=True)
class Image:
    """An image, from `GET /images/{name}/json`."""

    id: str
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    """Paths that it declares as volumes."""
    size: int = 0
    """Bytes."""
    digests: tuple[str, ...] = ()
    """Names with the digests of its manifests in the registries that it was pulled from."""
    tags: tuple[str, ...] = ()
    """All its names."""
    config_size: int = 0
    """Bytes of its configuration: labels, environment and so on."""


class EngineImages:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` distinguishes the nodes that use one engine; lower case."""
        self._engine = engine
        self._repository = f"{NAMESPACE}/{node}"
        self._cache: dict[str, tuple[float, Image | None]] = {}

    async def find(self, name: str) -> Image | None:
        """The image of a name or id. The answer is at most `CACHE_SECONDS` old."""
        cached = self._cache.get(name)
        if cached is not None and time.monotonic() - cached[0] < CACHE_SECONDS:
            return cached[1]
        found = None
        with translated(), ignored(NOT_FOUND):
            found = _image(await self._engine.docker.images.inspect(name))
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[name] = (time.monotonic(), found)
        return found

    def forget(self, name: str) -> None:
        """Drop a name from the cache: it stands for another image now."""
        self._cache.pop(name, None)

    def own_reference(self, name: str) -> str:
        """The reference of the image that has `name` as its own name."""
        return f"{self._repository}:{name}"

    async def find_own(self, name: str) -> Image | None:
        return await self.find(self.own_reference(name))

    async def tag(self, image_id: str, name: str) -> None:
        """Give an image the own name `name`, in addition to its other names."""
        with translated():
            await self._engine.docker.images.tag(image_id, self._repository, tag=name)
        self._cache.clear()  # The cached image has a list of its names.

    async def find_of_other_nodes(self, name: str) -> Image | None:
        """The image to which another node on this engine gave this name."""
        found = await self._list(f"{NAMESPACE}/*:{name}")
        return await self.find(str(found[0]["Id"])) if found else None

    async def own_names(self) -> list[str]:
        found = await self._list(f"{self._repository}:*")
        tags = [tag for image in found for tag in image.get("RepoTags") or ()]
        prefix = f"{self._repository}:"
        return sorted(tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix))

    async def _list(self, reference: str) -> list[dict[str, Any]]:
        with translated():
            return await self._engine.docker.images.list(filters={"reference": [reference]})

    async def remove(self, name: str) -> bool:
        """Remove an own name, and with the last name the image; false while a container uses it."""
        return await self.untag(self.own_reference(name))

    async def untag(self, reference: str) -> bool:
        self.forget(reference)
        with translated(), ignored(CONFLICT):
            with ignored(NOT_FOUND):
                await self._engine.docker.images.delete(reference)
            return True
        return False


def _image(inspected: Mapping[str, Any]) -> Image:
    config = inspected.get("Config") or {}
    env = [variable.partition("=") for variable in config.get("Env") or ()]
    return Image(
        id=str(inspected["Id"]),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        env={name: value for name, _, value in env},
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "",
        volumes=tuple(config.get("Volumes") or ()),
        size=int(inspected.get("Size") or 0),
        digests=tuple(inspected.get("RepoDigests") or ()),
        tags=tuple(inspected.get("RepoTags") or ()),
        config_size=len(json.dumps(config)),
    )
