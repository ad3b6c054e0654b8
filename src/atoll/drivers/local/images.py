"""
What this machine's instances are made from: root file systems, with layers of Debian packages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.base import NO_INPUTS
from atoll.drivers.local import root_file_system
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta
    from pathlib import Path

    from atoll.drivers.base import ImageInputs
    from atoll.drivers.local.debian_layers import Layers
    from atoll.drivers.local.sandbox import RootFileSystem
    from atoll.model.image import ImageInfo
    from atoll.model.template import Layer, Template


class LocalImages:
    features: frozenset[str] = frozenset()

    def __init__(self, layers: Layers, roots: tuple[Path, ...], python: Path | None) -> None:
        """`roots` are the directories below which templates may name a root file system."""
        self._layers = layers
        self._roots = roots
        self._python = python
        self._etc: Path
        self._trees: dict[tuple[str, datetime, int], RootFileSystem] = {}

    def open(self, node: Path) -> None:
        self._etc = root_file_system.write_etc(node)

    async def check(self, template: Template) -> None:
        """Raise `InvalidRequest` if the template cannot be used here."""
        await asyncio.to_thread(root_file_system.check_allowed, template, self._roots)
        if template.layers:
            await asyncio.to_thread(self._layers.check, template.root)
        if not await self.is_built(template):
            return
        try:
            # Not from the cache: this version of the template may never be stored.
            tree = await self._new_tree(template)
        except OSError as error:
            raise InvalidRequest(
                f"{template.root or template.python} cannot be used as a root file system or "
                f"interpreter: {error.strerror}.",
                code="place_not_usable",
                field="image" if template.image else "base_image",
            ) from error
        root_file_system.check_usable(tree)

    async def tree(self, template: Template) -> RootFileSystem:
        """The read-only files of the template's instances."""
        key = template.edition
        if key not in self._trees:
            self._trees[key] = await self._new_tree(template)
        return self._trees[key]

    def default_tree(self) -> RootFileSystem:
        """The tree of templates without a root file system or interpreter of their own."""
        return root_file_system.default_root(self._etc, self._python)

    async def _new_tree(self, template: Template) -> RootFileSystem:
        return await asyncio.to_thread(
            root_file_system.root_of,
            template,
            self._etc,
            self._python,
            self._roots,
            tuple(self._layers.directory(layer) for layer in reversed(template.layers)),
        )

    @staticmethod
    async def identity(template: Template) -> tuple[str, ...]:
        return root_file_system.identity(template)

    async def is_built(self, template: Template) -> bool:
        return not await asyncio.to_thread(self._layers.missing, template.layers)

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer | None:
        return None

    async def inspect(self, template: Template) -> ImageInfo | None:
        return None

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
        inputs: ImageInputs = NO_INPUTS,
    ) -> None:
        found = template.layers
        for layer in await asyncio.to_thread(self._layers.missing, found):
            below = found[: found.index(layer)]
            await self._layers.build(
                template.root, below, layer, timeout=timeout, on_output=on_output
            )

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._layers.names)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(self._layers.discard, name)


def check_no_image(template: Template) -> None:
    given = {
        "dockerfile": bool(template.dockerfile),
        "runtime": bool(template.runtime),
        "registry": template.registry is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidRequest(
                f"{name}: this node has no Docker (ATOLL_DRIVER=docker); give base_image and "
                "packages, or a root file system directory as image.",
                code=f"{name}_unsupported",
                field=name,
            )
