"""
Templates as images of an engine: the part of the driver's contract that is about them.

The layer of a template is its image, held by the layer's name. It is an image that the engine has
by the name that the template gives, or that is pulled by it, or one that is built from the
template's Dockerfile. What a name stands for is settled on a node when it is first needed there;
where the first node had it from a registry, the others get the same by its digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.base import NO_MATERIAL
from atoll.drivers.docker import dockerfiles
from atoll.errors import InvalidRequest, TemporaryError
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


class ImageTemplates:
    def __init__(
        self, engine: Engine, images: Images, settings: DockerSettings, scratch: Path
    ) -> None:
        """`scratch` is a directory for files that are there for a moment."""
        self._engine = engine
        self._images = images
        self._settings = settings
        self._scratch = scratch
        self._digests: dict[str, str] = {}
        """Of what was pulled here, by layer: the engine forgets them with the name."""

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

    def _name(self, template: Template) -> str:
        held = next((layer for layer in reversed(template.layers) if layer.image), None)
        return (held or self.image_layer(template)).name

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
            dockerfiles.check(template.dockerfile, network=self._settings.build_network != "none")
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
        """Its image, for an instance; `TemporaryError`, `image_missing`, when it is not here."""
        if await self.built(template):
            found = await self._images.held(self._name(template))
            if found is not None:
                return found
        raise TemporaryError(
            f"The image of template {template.id} is not on this node: "
            f"{'it is built' if template.dockerfile else self._reference(template)}.",
            code=MISSING,
        )

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
        await self._images.hold(found, name)
        return True

    async def _there(self, template: Template, name: str) -> str | None:
        """The id of an image that will do, and that the engine has."""
        if not template.dockerfile:
            found = await self._images.find(self._reference(template))
            if found is not None and self._will_do(found, template):
                return found.id
        return await self._images.held_by_others(name)

    def _will_do(self, found: Image, template: Template) -> bool:
        build = template.build
        if build is not None and build.image is not None and build.image.digest is not None:
            return any(each.endswith(f"@{build.image.digest}") for each in found.digests)
        # To be looked up anew: what is here may not be what the name stands for now.
        return build is None or not build.anew

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
            reference = self._reference(template)
            if build is not None and build.image is not None and build.image.digest is not None:
                reference = parse(reference).pinned(build.image.digest)
            found = await self._images.bring(
                reference, name, material.auth, timeout=timeout, say=say
            )
            self._digests |= _digest_of(found, reference, name)
        await self._tell(template, say)

    async def _tell(self, template: Template, say: Callable[[bytes], None]) -> None:
        image = await self.find(template)
        python = await self._images.python(image, template.python)
        inside = f"Python is {python}" if python else "It has no Python"
        say(f"Image {image.id}, {image.size} bytes. {inside}.\n".encode())

    async def image(self, template: Template) -> ImageInfo:
        found, name = await self.find(template), self._name(template)
        digest = self._digests.get(name)
        if digest is None and not template.dockerfile:
            digest = _digest_of(found, self._reference(template), name).get(name)
        return ImageInfo(digest, found.entrypoint, found.cmd)

    async def layers(self) -> list[str]:
        return await self._images.names_held()

    async def discard_layer(self, name: str) -> None:
        self._digests.pop(name, None)
        if not await self._images.let_go(name):
            log.info("image.in_use", layer=name)


def _digest_of(found: Image, reference: str, name: str) -> dict[str, str]:
    repository = parse(reference).name
    for each in found.digests:
        known, _, digest = each.partition("@")
        if known == repository:
            return {name: digest}
    return {}
