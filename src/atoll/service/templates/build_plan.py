"""
Plans the build of a template's version: resolves its base and names its layers.

A layer is named by what it is made from, so that versions with the same inputs share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import structlog

from atoll.errors import InvalidRequest, NotFound, TemporaryError
from atoll.model import packages
from atoll.model.template import BASE_TEMPLATE, Build, Layer, Template, TemplateStatus
from atoll.service.packages.environments import require_packages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from atoll.drivers.base import Driver

log = structlog.get_logger(__name__)


class BuildPlanner:
    def __init__(self, driver: Driver, ready: Callable[[str], Awaitable[Template]]) -> None:
        """`ready` returns the newest ready version of a template."""
        self._driver = driver
        self._ready = ready

    async def plan(self, template: Template, *, fresh: str = "") -> Template:
        """
        The template with its base resolved and its layers named, so that later changes of other
        templates do not affect it. It is `pending` if something must be built. `fresh` makes the
        name of its own layer unique, so that it is built again.
        """
        build = template.build
        if self._driver.images.image_layer(template) is not None:
            return await self._with_image(template, build or Build(), fresh)
        if build is None:
            return template
        if template.image:
            raise InvalidRequest(
                "image: a template with packages needs `base_image` instead of `image`.",
                field="image",
            )
        base = await self._base(template)
        layers, root = base.layers, base.root
        inherited = base.build.python_packages if base.build is not None else ()
        if build.python_packages or inherited:
            await require_packages(self._driver).check()
        if build.debian_packages:
            packages = tuple(sorted(set(build.debian_packages)))
            made_from = [root, [layer.name for layer in layers], packages, fresh]
            name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:40]
            layers = (*layers, Layer(name, packages))
        return dataclasses.replace(
            template,
            python=template.python or base.python,
            status=TemplateStatus.PENDING,
            build=Build(
                debian_packages=build.debian_packages,
                python_packages=_requirements(inherited, build.python_packages),
                root=root,
                layers=layers,
                anew=bool(fresh),
            ),
        )

    async def _with_image(self, template: Template, build: Build, fresh: str) -> Template:
        """The plan on a node with images: `ready` at once if the node already has the image."""
        base = await self._base_with_image(template, build)
        inherited: tuple[str, ...] = ()
        layers: tuple[Layer, ...] = ()
        if base is not None and base.build is not None:
            inherited, layers = base.build.python_packages, base.layers
        found = Build(
            debian_packages=build.debian_packages,
            python_packages=_requirements(inherited, build.python_packages),
            root="" if base is None or template.dockerfile else base.root,
            layers=layers,
            anew=bool(fresh),
        )
        template = dataclasses.replace(
            template,
            python=template.python or ("" if base is None else base.python),
            status=TemplateStatus.PENDING,
            build=found,
        )
        if not layers or fresh:
            layer = self._driver.images.image_layer(template, fresh=fresh)
            assert layer is not None
            found = dataclasses.replace(found, layers=(layer,))
            template = dataclasses.replace(template, build=found)
        await self._driver.check(template)
        if found.python_packages:
            await require_packages(self._driver).check()
            return template
        try:
            if not await self._driver.images.is_built(template):
                return template
            image = await self._driver.images.inspect(template)
        except TemporaryError as error:
            log.info("template.not_looked_up", template_id=template.id, error=error.message)
            return template
        return dataclasses.replace(
            template,
            status=TemplateStatus.READY,
            build=dataclasses.replace(found, image=image),
        )

    async def _base_with_image(self, template: Template, build: Build) -> Template | None:
        """The base of a template that has neither an image nor a Dockerfile of its own."""
        if template.image or template.dockerfile:
            return None
        of_template = template.base_image.startswith(BASE_TEMPLATE)
        if not of_template and not build.python_packages:
            return None
        base = await self._base(template)
        if of_template and (base.dockerfile or base.registry is not None):
            raise InvalidRequest(
                f"base_image: template {base.id} has a Dockerfile or registry credentials, so it "
                "cannot be a base on this node. Give this template the same instead.",
                field="base_image",
            )
        return base

    async def _base(self, template: Template) -> Template:
        """The base, as a template."""
        name = template.base_image
        if not name.startswith(BASE_TEMPLATE):
            return dataclasses.replace(template, image=name, build=None, python="")
        base_id = name.removeprefix(BASE_TEMPLATE)
        if base_id == template.id:
            raise InvalidRequest(
                "base_image: a template cannot be its own base.", field="base_image"
            )
        try:
            return await self._ready(base_id)
        except NotFound as error:
            raise InvalidRequest(f"base_image: {error.message}", field="base_image") from error


def _requirements(inherited: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Both sets, normalised; the template's own requirement of a package wins."""
    try:
        merged = packages.merged(
            [packages.read(each) for each in inherited],
            [packages.read(each) for each in own],
        )
    except InvalidRequest as error:
        words = error.message.replace("dependencies:", "python_packages:")
        raise InvalidRequest(words, field="python_packages") from error
    return tuple(each.requirement for each in merged)


def builds_same(old: Template, new: Template) -> bool:
    """Whether the finished build of `old` is what `new` needs."""
    if old.build is None or new.build is None or old.status is not TemplateStatus.READY:
        return False
    return (
        old.python == new.python
        and all(
            getattr(old.build, name) == getattr(new.build, name)
            for name in ("root", "debian_packages", "python_packages")
        )
        and (old.layers == new.layers or _same_image(old, new))
    )


def _same_image(old: Template, new: Template) -> bool:
    """Whether both images are made from the same inputs, even if one was rebuilt."""
    return (
        bool(old.layers and new.layers)
        and all(layer.image for layer in (*old.layers, *new.layers))
        and not new.base_image.startswith(BASE_TEMPLATE)
        and (old.dockerfile, old.build_context, old.root)
        == (new.dockerfile, new.build_context, new.root)
    )
