"""
Signed links, by which others get or put one file of a session without a key.

They lead to this server, or straight to the blob store where it has addresses of its own: then a
file is brought there first, as one object beneath `exports/<session>/`, and what is put there
beneath `uploads/<session>/` is brought into the workspace by a second link. When the blob store
does not answer, they lead here. Those that lead here end with the API key that asked for them.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.errors import Forbidden, InvalidRequest, NotFound, TemporaryError
from atoll.service.files.grants import Grant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.blobs.base import Blobs
    from atoll.service.auth.service import ApiKeys
    from atoll.service.files.grants import GrantTokens
    from atoll.service.files.service import Files
    from atoll.service.files.types import FileInfo
    from atoll.service.sessions.connections import Connections

log = structlog.get_logger(__name__)

PREFIX = "/api/v1/signed/"
ARTIFACT_LIFE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class SignedUrl:
    url: str
    """Begins with `/` when it leads to this server, whatever that is called."""
    method: str
    expires_at: datetime
    native: bool = False
    """Whether it leads straight to the blob store."""
    complete: str | None = None
    """The link to POST to when something was put to a native one."""


class SignedUrls:
    def __init__(
        self,
        files: Files,
        connections: Connections,
        grant_tokens: GrantTokens,
        blobs: Blobs,
        keys: ApiKeys | None,
    ) -> None:
        """`keys` are those that links are made with; null where no key is needed."""
        self._files = files
        self._connections = connections
        self._grant_tokens = grant_tokens
        self._blobs = blobs
        self._keys = keys

    def artifact(self, session_id: str, path: str, *, key_id: str | None) -> str:
        """A link to download a file of a session; without a look whether it is there."""
        grant = Grant("GET", session_id, path, may_start=False, key_id=key_id)
        return self._own(grant, ARTIFACT_LIFE).url

    async def granted(self, token: str, method: str) -> Grant:
        grant = self._grant_tokens.verify(token, method)
        if (
            self._keys is not None
            and grant.key_id is not None
            and not await self._keys.exists(grant.key_id)
        ):
            raise Forbidden(
                "This link is no longer good: the API key that asked for it was removed.",
                code="signed_url_revoked",
            )
        return grant

    def _own(self, grant: Grant, life: timedelta) -> SignedUrl:
        token, end = self._grant_tokens.make(grant, life)
        return SignedUrl(PREFIX + token, grant.method, end)

    async def get(
        self,
        session_id: str,
        path: str,
        life: timedelta,
        *,
        key_id: str | None,
        filename: str | None = None,
    ) -> SignedUrl:
        await self._check(session_id, path)
        own = self._own(Grant("GET", session_id, path, filename, key_id=key_id), life)
        try:
            # Before anything is brought there: most have no address of their own.
            if await self._blobs.presign("GET", f"exports/{session_id}/any", life) is None:
                return own
            key = await self._export(session_id, path)
            url = await self._blobs.presign("GET", key, life)
        except TemporaryError as error:
            log.info("link.not_native", session_id=session_id, error=error.message)
            return own
        return own if url is None else SignedUrl(url, "GET", own.expires_at, native=True)

    async def _export(self, session_id: str, path: str) -> str:
        """The file as an object, which is made unless this version of it is there already."""
        found = await self._files.read(session_id, path)
        async with contextlib.aclosing(_generator(found.content)) as content:
            name = f"{path}\0{found.entry.etag}".encode("utf-8", "surrogateescape")
            key = f"exports/{session_id}/{hashlib.sha256(name).hexdigest()}"
            if await self._blobs.head(key) is None:
                await self._blobs.write(key, content)
        return key

    async def put(
        self, session_id: str, path: str, life: timedelta, *, key_id: str | None, direct: bool
    ) -> SignedUrl:
        await self._check(session_id, path)
        own = self._own(Grant("PUT", session_id, path, key_id=key_id), life)
        if not direct:
            return own
        key = f"uploads/{session_id}/{ids.secret()[:32]}"
        try:
            url = await self._blobs.presign("PUT", key, life)
        except TemporaryError as error:
            log.info("link.not_native", session_id=session_id, error=error.message)
            return own
        if url is None:
            return own
        grant = Grant("POST", session_id, path, upload=key, key_id=key_id)
        complete = self._own(grant, life)
        return SignedUrl(url, "PUT", own.expires_at, native=True, complete=complete.url)

    async def complete(self, grant: Grant) -> FileInfo:
        """Bring what was put into the blob store into the workspace, and remove it there."""
        assert grant.upload is not None
        opened = await self._blobs.open(grant.upload)
        if opened is None:
            raise NotFound(
                "Nothing was put to the link that belongs to this one, or it was fetched already.",
                code="upload_not_found",
            )
        entry = await self._files.write(grant.session_id, grant.path, opened.pieces)
        await self._blobs.remove(grant.upload)
        return entry

    async def _check(self, session_id: str, path: str) -> None:
        await self._connections.session(session_id)
        parts = path.split("/")
        if not path.strip("/") or ".." in parts or "\0" in path:
            raise InvalidRequest(f"path: {path!r} names no file of a workspace.", code="bad_path")


async def _generator(content: AsyncIterator[bytes]) -> Any:
    async for piece in content:
        yield piece
