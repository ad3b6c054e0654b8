"""
Inputs of image builds that are stored apart from the template: registry credentials and build
contexts.

Credentials are write-only: encrypted for one template and one server, decrypted when a node pulls,
and never part of a response, event or log. A build context is a tar archive in the blob store,
named by its SHA-256 and uploaded before the template that uses it.
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
"""Prefix in the blob store."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BuildInputs:
    def __init__(self, blobs: Blobs, encryption: Encryption) -> None:
        self._blobs = blobs
        self._encryption = encryption

    async def of(self, template: Template) -> ImageInputs:
        """
        The inputs of a template, for the node that builds it. Raises `PermanentError` if the build
        context is missing or the credentials cannot be decrypted.
        """
        context = None
        if template.build_context is not None:
            context = BuildFiles(template.build_context, self._opener(template.build_context))
        return ImageInputs(await self._credentials(template), context)

    # Credentials

    async def seal_credentials(
        self, template: Template, given: RegistryAuth | None, before: Registry | None
    ) -> Registry | None:
        """
        Encrypted credentials to store with the template. Given credentials that have only a server
        stand for those that the template already has for it.
        """
        if given is None:
            return None
        server = given.server or _server(template)
        if template.image and server != _server(template):
            raise InvalidRequest(
                f"registry.server: the image is on {_server(template)}, the credentials are for "
                f"{server}.",
                field="registry.server",
            )
        if not given.username and not given.identity_token:
            if before is None or before.server != server:
                raise InvalidRequest(
                    f"registry: the template has no credentials for {server} yet. Set username and "
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
            server,
            self._encryption.seal(json.dumps(secret), _encryption_context(template.id, server)),
        )

    async def _credentials(self, template: Template) -> RegistryAuth | None:
        registry = template.registry
        if registry is None:
            return None
        await asyncio.to_thread(self._encryption.prepare)
        text = self._encryption.open(
            registry.sealed, _encryption_context(template.id, registry.server)
        )
        if text is None:
            raise PermanentError(
                f"Cannot decrypt the credentials of template {template.id} for {registry.server}: "
                "they were encrypted with another key, or were modified. Add that key to "
                "secrets.old_keys, or set the credentials again.",
                code="secret_unreadable",
            )
        return RegistryAuth(registry.server, **json.loads(text))

    # Contexts

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Store a context; returns its size in bytes."""
        _check(digest)

        async def verified() -> AsyncIterator[bytes]:
            found = hashlib.sha256()
            async for chunk in chunks:
                found.update(chunk)
                yield chunk
            if found.hexdigest() != digest:
                raise InvalidRequest(
                    f"The SHA-256 of the body is {found.hexdigest()}, not {digest}.",
                    code="digest_mismatch",
                )

        return await self._blobs.write(CONTEXTS + digest, verified())

    async def size(self, digest: str) -> int:
        """Size of a context in bytes."""
        info = await self._blobs.head(CONTEXTS + _check(digest))
        if info is None:
            raise _no_context(digest)
        return info.size

    async def check(self, template: Template) -> None:
        """Raise `InvalidRequest` if the build context of a template is missing."""
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
            "registry.server: required, because the template names no image.",
            field="registry.server",
        ) from None


def _check(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidRequest("The name of a build context must be its SHA-256 in hexadecimal.")
    return digest


def _no_context(digest: str) -> NotFound:
    return NotFound(
        f"There is no build context {digest}. Upload it first.", code="build_context_not_found"
    )


def _encryption_context(template_id: str, server: str) -> str:
    return f"atoll template registry\n{template_id}\n{server}"
