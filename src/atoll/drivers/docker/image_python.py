"""
Finds the Python interpreter of an image without running the image.

The engine can show the files of a container that was created and never started, so the search uses
such a container (a probe).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import posixpath
import secrets
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker.container_config import PATH
from atoll.drivers.docker.errors import EngineUnavailable, translated
from atoll.drivers.docker.labels import Label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.engine_images import Image

PROBE = "atoll-probe-"
"""Start of the names of probes."""
NAMES = ("python3", "python")
MAX_DIRECTORIES = 64
"""Directories of an image's PATH that are searched."""
_LINK_BIT = 1 << 27
_TYPE_BITS = 0x8F280000
"""
Go's `os.FileMode`, which the engine reports: a symbolic link has the first, and everything but a
regular file has one of the others.
"""

log = structlog.get_logger(__name__)


class PythonFinder:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the value of `Label.PROBE` on this node's probes."""
        self._engine = engine
        self._node = node
        self._found: dict[tuple[str, str], str | None] = {}

    async def find(self, image: Image, wanted: str = "") -> str | None:
        """
        Path of the interpreter: of `wanted`, which is a path or a name, or of the first Python on
        the image's PATH. Null if there is none.
        """
        key = (image.id, wanted)
        if key not in self._found:
            self._found[key] = await self._search(image, wanted)
        return self._found[key]

    async def _search(self, image: Image, wanted: str) -> str | None:
        with translated():
            async with self._probe(image) as container:
                for path in _candidates(image, wanted):
                    if await self._is_executable(container, path):
                        return path
                if await self._engine.inspect(container) is None:
                    # The search found nothing because the container is gone.
                    raise EngineUnavailable(
                        "Cannot search an image for Python: the container was removed meanwhile."
                    )
        return None

    @contextlib.asynccontextmanager
    async def _probe(self, image: Image) -> AsyncIterator[str]:
        config: dict[str, Any] = {
            "Image": image.id,
            "Entrypoint": ["-"],
            "Labels": {Label.PROBE: self._node},
            "HostConfig": {"NetworkMode": "none"},
        }
        # Not cancelled: the engine would create a container whose id is not known.
        name = f"{PROBE}{secrets.token_hex(8)}"
        creating = asyncio.ensure_future(self._engine.docker.containers.create(config, name=name))
        try:
            container = await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.wait([creating])
            if not creating.cancelled() and creating.exception() is None:
                await self._remove(creating.result().id)
            raise
        try:
            yield container.id
        finally:
            await asyncio.shield(self._remove(container.id))

    async def _remove(self, container: str) -> None:
        try:
            await self._engine.delete_container(container)
        except (DockerError, aiohttp.ClientError, TimeoutError, OSError) as error:
            # `remove_probes` removes it later.
            log.info("docker.probe_left", container=container[:12], error=str(error))

    async def _is_executable(self, container: str, path: str) -> bool:
        for _ in range(2):
            stat = await self._stat(container, path)
            if stat is None:
                return False
            mode, target = int(stat["mode"]), str(stat.get("linkTarget") or "")
            if not mode & _LINK_BIT:
                return not mode & _TYPE_BITS and bool(mode & 0o111)
            path = target  # The engine has followed all links.
        return False

    async def _stat(self, container: str, path: str) -> dict[str, Any] | None:
        docker = self._engine.docker
        # Not through aiodocker, which reads the body of every error: HEAD has none.
        url = docker._canonicalize_url(f"containers/{container}/archive")
        async with docker.session.head(url, params={"path": path}) as response:
            if response.status == 404:
                return None
            if response.status != 200:
                raise DockerError(response.status, f"Cannot look up {path} in an image.")
            header = response.headers["X-Docker-Container-Path-Stat"]
        stat: dict[str, Any] = json.loads(base64.b64decode(header))
        return stat

    async def remove_probes(self) -> None:
        """Remove the probes of processes that were killed."""
        with translated():
            filters = {"label": [f"{Label.PROBE}={self._node}"]}
            for found in await self._engine.containers(filters):
                # The names are checked too: containers inherit the labels of their image.
                if any(name.startswith(f"/{PROBE}") for name in found["Names"] or ()):
                    await self._remove(found["Id"])


def _candidates(image: Image, wanted: str) -> list[str]:
    if wanted.startswith("/"):
        return [wanted]
    directories = [part for part in image.env.get("PATH", PATH).split(":") if part]
    return [
        posixpath.join(directory, name)
        for name in ((wanted,) if wanted else NAMES)
        for directory in directories[:MAX_DIRECTORIES]
    ]
