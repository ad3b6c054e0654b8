"""
Templates as images of an engine: the part of the driver's contract that is about them.

The layer of a template is its image, held by the layer's name. It is an image that the engine has
by the name that the template gives, or that is pulled by it, or one that is built from the
template's Dockerfile. What a name stands for is settled when a version of a template is built;
where that came from a registry, other nodes get the same by its digest, and it is held by the
layer's name with the digest too: by then another version's image may have the name alone.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.base import NO_MATERIAL
from atoll.drivers.docker import dockerfile
from atoll.drivers.docker.images import MAX_CONFIG
from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.image import ImageInfo, parse
from atoll.model.template import IMAGE, Layer, runtime_feature

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.base import Material
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.images import Image, Images
    from atoll.model.template import Template
    from atoll.settings import DockerSettings

MISSING = "image_missing"

log = structlog.get_logger(__name__)


class TemplateImages:
    def __init__(
        self, engine: Engine, images: Images, settings: DockerSettings, scratch: Path
    ) -> None:
        """`scratch` is a directory for files that are there for a moment."""
        self._engine = engine
        self._images = images
        self._settings = settings
        self._scratch = scratch

    async def open(self) -> None:
        await self._images.remove_probes()

    @property
    def features(self) -> frozenset[str]:
        """To be among the driver's."""
        return frozenset({IMAGE, *map(runtime_feature, self._runtimes())})

    def _runtimes(self) -> list[str]:
        return sorted(self._engine.info.get("Runtimes") or {})

    def _reference(self, template: Template) -> str:
        return template.root or self._settings.image

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer:
        if template.dockerfile:
            made_from = ["build", template.dockerfile, template.build_context or "", fresh]
        else:
            made_from = ["pull", self._reference(template), fresh]
        name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:40]
        return Layer(name, image=True)

    def _layer(self, template: Template) -> str:
        held = next((layer for layer in reversed(template.layers) if layer.image), None)
        return (held or self.image_layer(template)).name

    def _name(self, template: Template) -> str:
        """By which its image is held."""
        layer, digest = self._layer(template), _known_digest(template)
        return layer if digest is None else _with_digest(layer, digest)

    async def check(self, template: Template) -> None:
        build = template.build
        if build is not None and build.debian_packages:
            raise InvalidRequest(
                "debian_packages: this node makes sessions from images; install packages in a "
                "Dockerfile (RUN apt-get install).",
                code="debian_packages_unsupported",
                field="debian_packages",
            )
        if template.dockerfile:
            if template.image:
                raise InvalidRequest(
                    "image: the Dockerfile makes it; give one of the two.", field="image"
                )
            dockerfile.check(template.dockerfile, network=self._settings.build_network != "none")
        elif template.build_context is not None:
            raise InvalidRequest("build_context: it is for a dockerfile.", field="build_context")
        else:
            self._check_reference(template)
        if template.runtime and template.runtime not in self._runtimes():
            raise InvalidRequest(
                f"runtime: this engine has no {template.runtime}; it has "
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

    async def find(self, template: Template) -> Image:
        """
        Its image, for an instance; `TemporaryError`, `image_missing`, when it is not here, and
        `PermanentError`, `image_refused`, when its configuration is too large.
        """
        if await self.built(template):
            found = await self._images.held(self._name(template))
            if found is not None and found.config_size > MAX_CONFIG:
                raise PermanentError(
                    f"The configuration of the image of template {template.id} (labels, "
                    f"environment and the like) has {found.config_size} bytes. At most "
                    f"{MAX_CONFIG} are allowed.",
                    code="image_refused",
                )
            if found is not None:
                return found
        raise TemporaryError(
            f"The image of template {template.id} is not on this node: "
            f"{'it is built' if template.dockerfile else self._reference(template)}.",
            code=MISSING,
        )

    async def identity(self, template: Template) -> tuple[str, ...]:
        """
        Which image it is, by nothing that is in it. One that is built has another id on each node,
        and is known by all that it is built from.
        """
        if template.dockerfile:
            return ("dockerfile", self._layer(template), template.python)
        return ("image", (await self.find(template)).id, template.python)

    async def python(self, template: Template) -> str | None:
        """Where its interpreter is inside; none when there is none."""
        return await self._images.python(await self.find(template), template.python)

    async def built(self, template: Template) -> bool:
        name = self._name(template)
        if await self._images.held(name) is not None:
            return True
        found = await self._there(template, name)
        if found is None:
            return False
        await self._images.hold(found.id, name)
        await self._hold_digest(template, found)
        return True

    async def _hold_digest(self, template: Template, found: Image) -> None:
        """The engine forgets the digest with the name that the image was pulled by."""
        digest = self._digest_of(template, found)
        if digest is not None and _known_digest(template) is None:
            await self._images.hold(found.id, _with_digest(self._layer(template), digest))

    def _digest_of(self, template: Template, found: Image) -> str | None:
        if template.dockerfile:
            return None
        repository = parse(self._reference(template)).name
        for each in found.digests:
            name, _, digest = each.partition("@")
            if name == repository:
                return digest
        for tag in found.tags:
            layer, _, digest = tag.rpartition(":")[2].partition(".")
            if digest and layer == self._layer(template):
                return f"sha256:{digest}"
        return None

    async def _there(self, template: Template, name: str) -> Image | None:
        """One that will do, and that the engine has."""
        if not template.dockerfile:
            found = await self._images.find(self._reference(template))
            if found is not None and self._will_do(found, template):
                return found
        return await self._images.held_by_others(name)

    def _will_do(self, found: Image, template: Template) -> bool:
        digest = _known_digest(template)
        if digest is not None:
            return any(each.endswith(f"@{digest}") for each in found.digests)
        # To be looked up anew: what is here may not be what the name stands for now.
        return template.build is None or not template.build.anew

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        say: Callable[[bytes], None],
        material: Material = NO_MATERIAL,
    ) -> None:
        if await self.built(template):
            return
        name, build = self._name(template), template.build
        if template.dockerfile:
            await self._images.build(
                template.dockerfile,
                material.context,
                name,
                args=self._settings.build_args,
                auth=material.auth,
                anew=build is not None and build.anew,
                scratch=self._scratch,
                timeout=timeout,
                say=say,
            )
        else:
            reference, digest = self._reference(template), _known_digest(template)
            if digest is not None:
                reference = parse(reference).pinned(digest)
            found = await self._images.bring(
                reference, name, material.auth, timeout=timeout, say=say
            )
            await self._hold_digest(template, found)
        await self._tell(template, say)

    async def _tell(self, template: Template, say: Callable[[bytes], None]) -> None:
        image = await self.find(template)
        python = await self._images.python(image, template.python)
        inside = f"Python is {python}" if python else "It has no Python"
        say(f"Image {image.id}, {image.size} bytes. {inside}.\n".encode())

    async def image(self, template: Template) -> ImageInfo:
        found = await self.find(template)
        return ImageInfo(self._digest_of(template, found), found.entrypoint, found.cmd)

    async def layers(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in await self._images.names_held()})

    async def discard_layer(self, name: str) -> None:
        for held in await self._images.names_held():
            if held.partition(".")[0] == name and not await self._images.let_go(held):
                log.info("image.in_use", layer=held)


def _known_digest(template: Template) -> str | None:
    """That of the image that this version was built to."""
    image = template.build.image if template.build is not None else None
    return image.digest if image is not None else None


def _with_digest(layer: str, digest: str) -> str:
    return f"{layer}.{digest.removeprefix('sha256:')}"
