"""Builds images from Dockerfiles. A cancelled build ends with its request."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.docker.build_tar import build_tar
from atoll.drivers.docker.errors import NO_SPACE, BuildFailed, RegistryUnavailable
from atoll.drivers.docker.image_requests import follow, messages, time_limit
from atoll.drivers.docker.labels import Label
from atoll.drivers.docker.registry_headers import build_headers
from atoll.errors import AtollError, NodeFull

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.base import ImageInputs
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.engine_images import EngineImages
    from atoll.settings import DockerSettings

MAX_ERROR_LINES = 20
"""Last lines of the output that an error contains."""

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_REGISTRY_ERRORS = (
    "dial tcp", "net/http", "tls handshake", "toomanyrequests", "unexpected http status: 5",
)  # fmt: skip


@dataclass(frozen=True)
class ImageBuild:
    dockerfile: str
    name: str
    """The own name that the image gets."""
    inputs: ImageInputs
    """Build files and the credentials of a registry."""
    fresh: bool
    """Build every layer again, and pull the base image again."""


class ImageBuilder:
    def __init__(
        self,
        engine: Engine,
        images: EngineImages,
        settings: DockerSettings,
        node: str,
        scratch: Path,
    ) -> None:
        """`scratch` is a directory for temporary files."""
        self._engine = engine
        self._images = images
        self._settings = settings
        self._node = node
        self._scratch = scratch

    async def build(
        self, build: ImageBuild, *, timeout: timedelta, on_output: Callable[[bytes], None]
    ) -> None:
        """
        Raises `BuildFailed`, `PermanentError` with code `build_context_invalid`, and
        `RegistryUnavailable` while the base image cannot be pulled.
        """
        reference = self._images.own_reference(build.name)
        params = self._params(reference, fresh=build.fresh)
        headers = {"Content-Type": "application/x-tar", **build_headers(build.inputs.auth)}
        last_lines = deque[str](maxlen=MAX_ERROR_LINES)

        def log(data: bytes) -> None:
            lines = data.decode("utf-8", "replace").splitlines()
            last_lines.extend(line for line in lines if line.strip())
            on_output(data)

        async with (
            time_limit(timeout, "The image was not built"),
            build_tar(build.dockerfile, build.inputs.files, self._scratch) as data,
        ):
            await follow(
                messages(self._engine, "build", params, headers, data),
                log,
                lambda text: _build_error(text, last_lines),
            )
        self._images.forget(reference)

    def _params(self, reference: str, *, fresh: bool) -> dict[str, str]:
        memory = str(self._settings.build_memory)
        params = {
            "t": reference,
            "rm": "1",
            "forcerm": "1",
            "networkmode": self._settings.build_network,
            "memory": memory,
            "memswap": memory,
            "buildargs": json.dumps(dict(self._settings.build_args)),
            "labels": json.dumps({Label.BUILT_BY: self._node}),
        }
        return params | ({"pull": "1", "nocache": "1"} if fresh else {})


def _build_error(text: str, last_lines: deque[str]) -> AtollError:
    lowered = text.lower()
    if NO_SPACE in lowered:
        return NodeFull(f"The Docker engine: {text}")
    is_of_command = lowered.startswith("the command ")
    if not is_of_command and any(part in lowered for part in _REGISTRY_ERRORS):
        return RegistryUnavailable(f"Cannot reach the registry of the Dockerfile's base: {text}")
    output = _COLOUR.sub("", "\n".join([*last_lines, text]))
    return BuildFailed(f"Cannot build the Dockerfile: {output}")
