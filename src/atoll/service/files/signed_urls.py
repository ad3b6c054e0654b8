"""
Signed URLs, with which others download or upload one file of a session without an API key.

A URL leads to this server, or to the blob store if that can presign URLs. For a download from the
blob store the file is first copied there, as one blob below `exports/<session>/`. An upload goes to
`uploads/<session>/`, and a second URL of this server moves it into the workspace. While the blob
store is unavailable all URLs lead to this server. A URL of this server is valid only as long as the
API key that requested it exists.
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
    from atoll.service.sessions.access import SessionAccess

log = structlog.get_logger(__name__)

PREFIX = "/api/v1/signed/"
ARTIFACT_LIFETIME = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class SignedUrl:
    url: str
    """Begins with `/` if it leads to this server."""
    method: str
    expires_at: datetime
    native: bool = False
    """Whether it leads to the blob store."""
    complete: str | None = None
    """The URL to POST to after an upload to the blob store."""


class SignedUrls:
    def __init__(
        self,
        files: Files,
        sessions: SessionAccess,
        grant_tokens: GrantTokens,
        blobs: Blobs,
        keys: ApiKeys | None,
    ) -> None:
        """`keys` is null where requests need no API key."""
        self._files = files
        self._sessions = sessions
        self._grant_tokens = grant_tokens
        self._blobs = blobs
        self._keys = keys

    def artifact(self, session_id: str, path: str, *, key_id: str | None) -> str:
        """A URL to download a file of a session; whether the file exists is not checked."""
        grant = Grant("GET", session_id, path, may_start=False, key_id=key_id)
        return self._sign(grant, ARTIFACT_LIFETIME).url

    async def verify(self, token: str, method: str) -> Grant:
        grant = self._grant_tokens.verify(token, method)
        if (
            self._keys is not None
            and grant.key_id is not None
            and not await self._keys.exists(grant.key_id)
        ):
            raise Forbidden(
                "This link is no longer valid: the API key that requested it was removed.",
                code="signed_url_revoked",
            )
        return grant

    def _sign(self, grant: Grant, lifetime: timedelta) -> SignedUrl:
        token, end = self._grant_tokens.make(grant, lifetime)
        return SignedUrl(PREFIX + token, grant.method, end)

    async def get(
        self,
        session_id: str,
        path: str,
        lifetime: timedelta,
        *,
        key_id: str | None,
        filename: str | None = None,
    ) -> SignedUrl:
        await self._check_path(session_id, path)
        own = self._sign(Grant("GET", session_id, path, filename, key_id=key_id), lifetime)
        try:
            # Before the file is copied: most blob stores cannot presign URLs.
            if await self._blobs.presign("GET", f"exports/{session_id}/any", lifetime) is None:
                return own
            key = await self._export(session_id, path)
            url = await self._blobs.presign("GET", key, lifetime)
        except TemporaryError as error:
            log.info("link.not_native", session_id=session_id, error=error.message)
            return own
        return own if url is None else SignedUrl(url, "GET", own.expires_at, native=True)

    async def _export(self, session_id: str, path: str) -> str:
        """Key of a blob with the file; copied unless this version of it was copied before."""
        found = await self._files.read(session_id, path)
        async with contextlib.aclosing(_generator(found.content)) as content:
            name = f"{path}\0{found.entry.etag}".encode("utf-8", "surrogateescape")
            key = f"exports/{session_id}/{hashlib.sha256(name).hexdigest()}"
            if await self._blobs.head(key) is None:
                await self._blobs.write(key, content)
        return key

    async def put(
        self, session_id: str, path: str, lifetime: timedelta, *, key_id: str | None, direct: bool
    ) -> SignedUrl:
        await self._check_path(session_id, path)
        own = self._sign(Grant("PUT", session_id, path, key_id=key_id), lifetime)
        if not direct:
            return own
        key = f"uploads/{session_id}/{ids.secret()[:32]}"
        try:
            url = await self._blobs.presign("PUT", key, lifetime)
        except TemporaryError as error:
            log.info("link.not_native", session_id=session_id, error=error.message)
            return own
        if url is None:
            return own
        grant = Grant("POST", session_id, path, upload=key, key_id=key_id)
        complete = self._sign(grant, lifetime)
        return SignedUrl(url, "PUT", own.expires_at, native=True, complete=complete.url)

    async def complete(self, grant: Grant) -> FileInfo:
        """Move an upload from the blob store into the workspace."""
        assert grant.upload is not None
        opened = await self._blobs.open(grant.upload)
        if opened is None:
            raise NotFound(
                "There is no upload to complete: nothing was uploaded, or it was completed before.",
                code="upload_not_found",
            )
        entry = await self._files.write(grant.session_id, grant.path, opened.chunks)
        await self._blobs.remove(grant.upload)
        return entry

    async def _check_path(self, session_id: str, path: str) -> None:
        await self._sessions.records.get(session_id)
        parts = path.split("/")
        if not path.strip("/") or ".." in parts or "\0" in path:
            raise InvalidRequest(
                f"path: {path!r} is not the path of a file in the workspace.", code="bad_path"
            )


async def _generator(content: AsyncIterator[bytes]) -> Any:
    async for piece in content:
        yield piece
