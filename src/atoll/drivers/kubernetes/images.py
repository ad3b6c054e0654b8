"""
Images of templates: the part of the driver's contract that concerns templates.

An image is "built" when a probe has run in it, which pulls it and finds its interpreter. What was
found is a config map of the cluster, named after the layer, that all replicas share.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.base import NO_INPUTS
from atoll.drivers.kubernetes.errors import NOT_FOUND, ImageNotPulled, ignored, translated
from atoll.drivers.kubernetes.labels import Label, node_digest, selector, value
from atoll.drivers.kubernetes.pod_manifest import ImageFacts
from atoll.errors import InvalidRequest, TemporaryError
from atoll.model.image import ImageInfo, parse
from atoll.model.template import IMAGE, Layer, runtime_feature

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from atoll.drivers.base import ImageInputs
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.image_probe import ImageProbe
    from atoll.model.template import Template
    from atoll.settings import KubernetesSettings

log = structlog.get_logger(__name__)


class KubernetesImages:
    def __init__(
        self,
        api: ApiClient,
        path: str,
        probe: ImageProbe,
        settings: KubernetesSettings,
        labels: dict[str, str],
    ) -> None:
        """`path` is that of the namespace's config maps; `labels` are those of the node."""
        self._api = api
        self._path = path
        self._probe = probe
        self._settings = settings
        self._labels = labels
        self._facts: dict[str, ImageFacts] = {}
        """By layer: a layer never changes."""

    @property
    def features(self) -> frozenset[str]:
        return frozenset({IMAGE, *map(runtime_feature, self.runtimes)})

    @property
    def runtimes(self) -> tuple[str, ...]:
        default = (self._settings.runtime_class,) if self._settings.runtime_class else ()
        return (*self._settings.runtime_classes, *default)

    # Names

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer:
        made_from = ["probe", self._reference(template), template.python, self._runtime(template)]
        name = hashlib.sha256(json.dumps([*made_from, fresh]).encode()).hexdigest()[:40]
        return Layer(name, image=True)

    def _layer(self, template: Template) -> str:
        recorded = next((layer for layer in reversed(template.layers) if layer.image), None)
        return (recorded or self.image_layer(template)).name

    def _reference(self, template: Template) -> str:
        return template.root or self._settings.image

    def _runtime(self, template: Template) -> str:
        return template.runtime or self._settings.runtime_class

    def _record(self, layer: str) -> str:
        return f"atoll-image-{layer}-{node_digest(self._labels)}"

    # Checks

    def check(self, template: Template) -> None:
        build = template.build
        if build is not None and build.debian_packages:
            raise InvalidRequest(
                "debian_packages: this node makes sessions from images. Install packages in the "
                "image.",
                code="debian_packages_unsupported",
                field="debian_packages",
            )
        if template.dockerfile or template.build_context is not None:
            raise InvalidRequest(
                "dockerfile: a cluster does not build images. Push the image to a registry and "
                "name it in `image`.",
                code="dockerfile_unsupported",
                field="dockerfile",
            )
        if template.registry is not None:
            raise InvalidRequest(
                "registry: on this node credentials of registries are secrets of the cluster; see "
                "ATOLL_KUBERNETES__IMAGE_PULL_SECRETS.",
                code="registry_unsupported",
                field="registry",
            )
        reference = self._reference(template)
        try:
            parse(reference)
        except ValueError:
            raise InvalidRequest(
                f"image: {reference[:200]!r} is not the name of an image, such as "
                "python:3.12-slim or registry.example.com/team/tools@sha256:… .",
                field="image",
            ) from None
        if template.runtime and template.runtime not in self.runtimes:
            known = ", ".join(self.runtimes) or "none"
            raise InvalidRequest(
                f"runtime: {template.runtime!r} is not a RuntimeClass that templates may name "
                f"(ATOLL_KUBERNETES__RUNTIME_CLASSES has {known}).",
                code="runtime_unsupported",
                field="runtime",
            )

    # Images of templates

    async def find(self, template: Template) -> ImageFacts:
        """
        What is known about the image for an instance. Raises `TemporaryError` with code
        `image_missing` if no probe has run in it yet.
        """
        facts = await self._known(self._layer(template))
        if facts is None:
            raise TemporaryError(
                f"The image of template {template.id} was not pulled yet "
                f"({self._reference(template)}).",
                code="image_missing",
            )
        return facts

    async def own(self) -> ImageFacts:
        """What is known about the operator's own image; a probe runs in it if it must."""
        runtime = self._settings.runtime_class
        made_from = json.dumps(["own", self._settings.image, runtime])
        layer = hashlib.sha256(made_from.encode()).hexdigest()[:40]
        facts = await self._known(layer)
        if facts is None:
            facts = await self._probe.run(
                self._settings.image, "", runtime, pull="IfNotPresent", report=log.info
            )
            # Without the label of images, which a sweep removes that no template needs.
            await self._record_facts(layer, facts, {Label.SHARED: "image"})
        return facts

    async def _known(self, layer: str) -> ImageFacts | None:
        if layer in self._facts:
            return self._facts[layer]
        with translated(), ignored(NOT_FOUND):
            answer = await self._api.get(f"{self._path}/{self._record(layer)}")
            found = json.loads(answer["data"]["facts"])
            found["volumes"] = tuple(found["volumes"])
            facts = self._facts[layer] = ImageFacts(**found)
            return facts
        return None

    async def is_built(self, template: Template) -> bool:
        return await self._known(self._layer(template)) is not None

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
        build, layer = template.build, self._layer(template)
        recorded = build.image.digest if build is not None and build.image is not None else None
        reference = self._reference(template)
        if recorded is not None:
            reference = parse(reference).pinned(recorded)

        def report(text: str) -> None:
            on_output(f"{text}\n".encode())

        report(f"The cluster pulls {reference}.")
        fresh = build is not None and build.anew
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                facts = await self._probe.run(
                    reference,
                    template.python,
                    self._runtime(template),
                    pull="Always" if fresh else "IfNotPresent",
                    report=report,
                )
        except TimeoutError:
            raise ImageNotPulled(
                f"The cluster did not run {reference} within {timeout.total_seconds():g} s."
            ) from None
        await self._record_facts(layer, facts, {Label.IMAGE: value(layer)})
        inside = f"Python is {facts.python}" if facts.python else "It has no Python"
        report(f"Image {facts.reference}. {inside}.")

    async def _record_facts(self, layer: str, facts: ImageFacts, labels: dict[str, str]) -> None:
        manifest: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self._record(layer),
                "labels": {**self._labels, **labels},
            },
            "data": {"facts": json.dumps(asdict(facts))},
        }
        with translated():
            await self._api.apply(f"{self._path}/{self._record(layer)}", manifest)
        self._facts[layer] = facts

    async def inspect(self, template: Template) -> ImageInfo:
        facts = await self.find(template)
        _, at, digest = facts.reference.rpartition("@")
        return ImageInfo(digest if at else None)

    # Layers

    async def names(self) -> list[str]:
        labels = {**self._labels, Label.IMAGE: ""}
        with translated():
            found = await self._api.get(self._path, labelSelector=selector(labels))
        return sorted(item["metadata"]["labels"][Label.IMAGE] for item in found["items"])

    async def remove(self, name: str) -> None:
        self._facts.pop(name, None)
        with translated(), ignored(NOT_FOUND):
            await self._api.delete(f"{self._path}/{self._record(name)}")
