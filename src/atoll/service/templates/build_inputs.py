"""
What images are made from beside their templates: credentials of registries, and build contexts.

Credentials are write-only: sealed for one template and one server, opened when a node pulls, and
part of no answer, event or log. A build context is a tar under its own digest in the blob store,
put there before the template that names it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import TYPE_CHECKING

from atoll.drivers.base import BuildFiles, ImageInputs, RegistryAuth
from atoll.errors import InvalidRequest, NotFound, PermanentError
from atoll.model.image import Registry, parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.blobs.base import Blobs
    from atoll.model.template import Template
    from atoll.service.auth.encryption import Encryption

CONTEXTS = "build-contexts/"
"""Where contexts are in the blob store."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BuildInputs:
    def __init__(self, blobs: Blobs, encryption: Encryption) -> None:
        self._blobs = blobs
        self._encryption = encryption

    async def of(self, template: Template) -> ImageInputs:
        """
        For a node that makes the template's image. Raises `PermanentError` when what the template
        names is not there any more, or cannot be read.
        """
        context = None
        if template.build_context is not None:
            context = BuildFiles(template.build_context, self._opener(template.build_context))
        return ImageInputs(await self._opened(template), context)

    # Credentials

    async def sealed(
        self, template: Template, given: RegistryAuth | None, before: Registry | None
    ) -> Registry | None:
        """
        What is stored of given credentials. Those that name a server alone are the ones that the
        template has already, which are for this server and no other.
        """
        if given is None:
            return None
        server = given.server or _server(template)
        if template.image and server != _server(template):
            raise InvalidRequest(
                f"registry.server: the image is of {_server(template)}; credentials for {server} "
                "are not for it.",
                field="registry.server",
            )
        if not given.username and not given.identity_token:
            if before is None or before.server != server:
                raise InvalidRequest(
                    f"registry: the template has no credentials for {server}; give username and "
                    "password, or identity_token.",
                    field="registry",
                )
            return before
        secret = {
            "username": given.username,
            "password": given.password,
            "identity_token": given.identity_token,
        }
        await asyncio.to_thread(self._encryption.prepare_to_seal)
        return Registry(
            server, self._encryption.seal(json.dumps(secret), _about(template.id, server))
        )

    async def _opened(self, template: Template) -> RegistryAuth | None:
        registry = template.registry
        if registry is None:
            return None
        await asyncio.to_thread(self._encryption.prepare)
        text = self._encryption.open(registry.sealed, _about(template.id, registry.server))
        if text is None:
            raise PermanentError(
                f"The credentials of template {template.id} for {registry.server} cannot be read: "
                "they were encrypted with another key, or have been changed. Bring the key back "
                "(secrets.old_keys), or give them anew.",
                code="secret_unreadable",
            )
        return RegistryAuth(registry.server, **json.loads(text))

    # Contexts

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep a context of that digest; how many bytes it has."""
        _check(digest)

        async def verified() -> AsyncIterator[bytes]:
            found = hashlib.sha256()
            async for chunk in chunks:
                found.update(chunk)
                yield chunk
            if found.hexdigest() != digest:
                raise InvalidRequest(
                    f"What came has the SHA-256 {found.hexdigest()}, and not {digest}.",
                    code="digest_mismatch",
                )

        return await self._blobs.write(CONTEXTS + digest, verified())

    async def size(self, digest: str) -> int:
        """Bytes of a context."""
        info = await self._blobs.head(CONTEXTS + _check(digest))
        if info is None:
            raise _no_context(digest)
        return info.size

    async def check(self, template: Template) -> None:
        """Raise `InvalidRequest` when the context that a template names is not there."""
        if template.build_context is None:
            return
        try:
            await self.size(template.build_context)
        except NotFound as error:
            raise InvalidRequest(
                f"build_context: {error.message}", code=error.code, field="build_context"
            ) from error

    def _opener(self, digest: str) -> Callable[[], Awaitable[AsyncIterator[bytes]]]:
        async def opened() -> AsyncIterator[bytes]:
            found = await self._blobs.open(CONTEXTS + digest)
            if found is None:
                error = _no_context(digest)
                raise PermanentError(error.message, code=error.code)
            return found.chunks

        return opened


def _server(template: Template) -> str:
    try:
        return parse(template.image).server
    except ValueError:
        raise InvalidRequest(
            "registry.server: name the registry that the credentials are for.",
            field="registry.server",
        ) from None


def _check(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidRequest("A build context is named by its SHA-256, in hexadecimal.")
    return digest


def _no_context(digest: str) -> NotFound:
    return NotFound(
        f"There is no build context {digest}; put it there first.", code="build_context_not_found"
    )


def _about(template_id: str, server: str) -> str:
    return f"atoll template registry\n{template_id}\n{server}"
