"""
Pulls images.

The name that a pull gives an image is removed again once the image has a name of the node's own. A
name that existed before the pull belongs to another client and is kept. A cancelled pull ends with
its request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.docker.errors import NO_SPACE, RegistryUnavailable
from atoll.drivers.docker.image_requests import follow, messages, time_limit
from atoll.drivers.docker.registry_headers import pull_headers
from atoll.errors import AtollError, NodeFull, PermanentError
from atoll.model.image import parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from atoll.drivers.base import RegistryAuth
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.engine_images import EngineImages, Image

_DENIED = ("unauthorized", "denied", "no basic auth", "authentication required", "forbidden")
_NOT_FOUND = ("not found", "manifest unknown", "name unknown", "no matching manifest")


class ImagePuller:
    def __init__(self, engine: Engine, images: EngineImages) -> None:
        self._engine = engine
        self._images = images

    async def pull(
        self,
        reference: str,
        auth: RegistryAuth | None,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
    ) -> Image:
        """
        Raises `PermanentError` with code `image_not_found` or `image_denied`, `BuildFailed` after
        the time-out, and `RegistryUnavailable`.
        """
        wanted = parse(reference)
        if auth is not None and auth.server != wanted.server:
            auth = None  # The engine would send them to the server of the image.
        params = {"fromImage": wanted.name, "tag": wanted.wanted}
        async with time_limit(timeout, f"{reference} was not pulled"):
            await follow(
                messages(self._engine, "images/create", params, pull_headers(auth)),
                on_output,
                lambda text: _pull_error(reference, text),
            )
            self._images.forget(reference)
            found = await self._images.find(reference)
        if found is None:
            raise RegistryUnavailable(f"{reference} was pulled, but the engine does not have it.")
        return found

    async def pull_and_tag(
        self,
        reference: str,
        name: str,
        auth: RegistryAuth | None,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
    ) -> Image:
        """Pull an image and give it the own name `name`, without leaving another name."""
        was_tagged = await self._images.find(reference) is not None
        found = await self.pull(reference, auth, timeout=timeout, on_output=on_output)
        await self._images.tag(found.id, name)
        if not was_tagged:
            await self._images.untag(reference)
        return found


def _pull_error(reference: str, text: str) -> AtollError:
    """The engine reports all causes with the same status, so the text decides."""
    lowered = text.lower()
    if NO_SPACE in lowered:
        return NodeFull(f"The Docker engine: {text}")
    if any(part in lowered for part in _DENIED):
        return PermanentError(
            f"No permission to pull {reference}: {text}. If the registry needs credentials, give "
            "them to the template (registry).",
            code="image_denied",
        )
    if any(part in lowered for part in _NOT_FOUND):
        return PermanentError(f"Image {reference} does not exist: {text}.", code="image_not_found")
    return RegistryUnavailable(f"Cannot reach the registry of {reference}: {text}")
