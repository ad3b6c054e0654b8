"""
Images of templates: the part of the driver's contract that concerns templates.

The layer of a template is an image, whose own name on the node is the name of the layer. Either the
engine has an image of the name that the template gives, or it is pulled, or it is built from the
template's Dockerfile. The build of a template's version decides which image a name stands for. If
the image came from a registry, other nodes pull it by its digest, and its own name there is that of
the layer with the digest: the layer's name alone may belong to the image of another version.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.base import NO_INPUTS
from atoll.drivers.docker import dockerfile
from atoll.drivers.docker.engine_images import EngineImages
from atoll.drivers.docker.image_build import ImageBuild, ImageBuilder
from atoll.drivers.docker.image_pull import ImagePuller
from atoll.drivers.docker.image_python import PythonFinder
from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.image import ImageInfo, parse
from atoll.model.template import IMAGE, Layer, runtime_feature

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.base import ImageInputs
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.engine_images import Image
    from atoll.model.template import Template
    from atoll.settings import DockerSettings

MAX_CONFIG = 256 * 1024
"""
Bytes of an image's configuration. The engine repeats the labels with each container of the image,
in every list of containers.
"""

log = structlog.get_logger(__name__)


class DockerImages:
    def __init__(self, engine: Engine, settings: DockerSettings, node: str, scratch: Path) -> None:
        """`node` is the node's name on the engine, `scratch` a directory for temporary files."""
        self._engine = engine
        self._settings = settings
        self.images = EngineImages(engine, node)
        self.pythons = PythonFinder(engine, node)
        self.puller = ImagePuller(engine, self.images)
        self.builder = ImageBuilder(engine, self.images, settings, node, scratch)

    async def open(self) -> None:
        await self.pythons.remove_probes()

    @property
    def features(self) -> frozenset[str]:
        return frozenset({IMAGE, *map(runtime_feature, self._runtimes())})

    def _runtimes(self) -> list[str]:
        return sorted(self._engine.info.get("Runtimes") or {})

    def _reference(self, template: Template) -> str:
        return template.root or self._settings.image

    # Names

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer:
        if template.dockerfile:
            source = ["build", template.dockerfile, template.build_context or "", fresh]
        else:
            source = ["pull", self._reference(template), fresh]
        name = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:40]
        return Layer(name, image=True)

    def _layer(self, template: Template) -> str:
        recorded = next((layer for layer in reversed(template.layers) if layer.image), None)
        return (recorded or self.image_layer(template)).name

    def _name(self, template: Template) -> str:
        """The own name of its image (`EngineImages.tag`)."""
        layer, digest = self._layer(template), _recorded_digest(template)
        return layer if digest is None else _with_digest(layer, digest)

    # Checks

    async def check(self, template: Template) -> None:
        build = template.build
        if build is not None and build.debian_packages:
            raise InvalidRequest(
                "debian_packages: this node makes sessions from images. Install packages in a "
                "Dockerfile (RUN apt-get install).",
                code="debian_packages_unsupported",
                field="debian_packages",
            )
        if template.dockerfile:
            if template.image:
                raise InvalidRequest(
                    "image: not allowed with dockerfile; give one of the two.", field="image"
                )
            dockerfile.check(template.dockerfile, network=self._settings.build_network != "none")
        elif template.build_context is not None:
            raise InvalidRequest(
                "build_context: only allowed with dockerfile.", field="build_context"
            )
        else:
            self._check_reference(template)
        if template.runtime and template.runtime not in self._runtimes():
            raise InvalidRequest(
                f"runtime: this engine does not have {template.runtime!r}. It has "
                f"{', '.join(self._runtimes())}.",
                code="runtime_unsupported",
                field="runtime",
            )

    def _check_reference(self, template: Template) -> None:
        reference = self._reference(template)
        try:
            parse(reference)
        except ValueError:
            raise InvalidRequest(
                f"image: {reference[:200]!r} is not the name of an image, such as "
                "python:3.12-slim or registry.example.com/team/tools@sha256:… .",
                field="image",
            ) from None

    # Images of templates

    async def find(self, template: Template) -> Image:
        """
        The image for an instance. Raises `TemporaryError` with code `image_missing` if it is not on
        this node, and `PermanentError` with code `image_refused` if its configuration is too large.
        """
        if await self.is_built(template):
            found = await self.images.find_own(self._name(template))
            if found is not None and found.config_size > MAX_CONFIG:
                raise PermanentError(
                    f"The configuration of the image of template {template.id} (labels, "
                    f"environment and so on) has {found.config_size} bytes. At most {MAX_CONFIG} "
                    "are allowed.",
                    code="image_refused",
                )
            if found is not None:
                return found
        source = "it is built from a Dockerfile"
        if not template.dockerfile:
            source = self._reference(template)
        raise TemporaryError(
            f"The image of template {template.id} is not on this node ({source}).",
            code="image_missing",
        )

    async def identity(self, template: Template) -> tuple[str, ...]:
        """
        Identifies the image without trusting its content. A built image has another id on each node
        and is identified by everything that it is built from.
        """
        if template.dockerfile:
            return ("dockerfile", self._layer(template), template.python)
        return ("image", (await self.find(template)).id, template.python)

    async def python(self, template: Template) -> str | None:
        """Path of the image's interpreter; null if it has none."""
        return await self.pythons.find(await self.find(template), template.python)

    async def is_built(self, template: Template) -> bool:
        name = self._name(template)
        if await self.images.find_own(name) is not None:
            return True
        found = await self._find_existing(template, name)
        if found is None:
            return False
        await self.images.tag(found.id, name)
        await self._tag_digest(template, found)
        return True

    async def _find_existing(self, template: Template, name: str) -> Image | None:
        """An image on the engine that can be used for the template."""
        if not template.dockerfile:
            found = await self.images.find(self._reference(template))
            if found is not None and self._is_suitable(found, template):
                return found
        return await self.images.find_of_other_nodes(name)

    def _is_suitable(self, found: Image, template: Template) -> bool:
        digest = _recorded_digest(template)
        if digest is not None:
            return any(known.endswith(f"@{digest}") for known in found.digests)
        # A fresh build looks the name up in the registry again: the tag may have moved.
        return template.build is None or not template.build.anew

    async def _tag_digest(self, template: Template, found: Image) -> None:
        """Record the digest in a name: the engine forgets it with the name that was pulled."""
        digest = self._digest_of(template, found)
        if digest is not None and _recorded_digest(template) is None:
            await self.images.tag(found.id, _with_digest(self._layer(template), digest))

    def _digest_of(self, template: Template, found: Image) -> str | None:
        if template.dockerfile:
            return None
        repository = parse(self._reference(template)).name
        for reference in found.digests:
            name, _, digest = reference.partition("@")
            if name == repository:
                return digest
        for tag in found.tags:
            layer, _, digest = tag.rpartition(":")[2].partition(".")
            if digest and layer == self._layer(template):
                return f"sha256:{digest}"
        return None

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
        inputs: ImageInputs = NO_INPUTS,
    ) -> None:
        if await self.is_built(template):
            return
        name, recorded = self._name(template), template.build
        if template.dockerfile:
            fresh = recorded is not None and recorded.anew
            build = ImageBuild(template.dockerfile, name, inputs, fresh)
            await self.builder.build(build, timeout=timeout, on_output=on_output)
        else:
            reference, digest = self._reference(template), _recorded_digest(template)
            if digest is not None:
                reference = parse(reference).pinned(digest)
            found = await self.puller.pull_and_tag(
                reference, name, inputs.auth, timeout=timeout, on_output=on_output
            )
            await self._tag_digest(template, found)
        await self._describe(template, on_output)

    async def _describe(self, template: Template, on_output: Callable[[bytes], None]) -> None:
        image = await self.find(template)
        python = await self.pythons.find(image, template.python)
        inside = f"Python is {python}" if python else "It has no Python"
        on_output(f"Image {image.id}, {image.size} bytes. {inside}.\n".encode())

    async def inspect(self, template: Template) -> ImageInfo:
        found = await self.find(template)
        return ImageInfo(self._digest_of(template, found), found.entrypoint, found.cmd)

    # Layers

    async def names(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in await self.images.own_names()})

    async def remove(self, name: str) -> None:
        for own in await self.images.own_names():
            if own.partition(".")[0] == name and not await self.images.remove(own):
                log.info("image.in_use", layer=own)


def _recorded_digest(template: Template) -> str | None:
    """Digest of the image that this version of the template was built to."""
    image = template.build.image if template.build is not None else None
    return image.digest if image is not None else None


def _with_digest(layer: str, digest: str) -> str:
    return f"{layer}.{digest.removeprefix('sha256:')}"
