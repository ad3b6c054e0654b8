"""
Grants: signed tokens that let their bearer do one thing to one file, for a while, without an API
key.

A grant names the method, the session, the path, its expiry, the file name of a download, and the
API key that requested it. It permits nothing else.
"""

from __future__ import annotations

import binascii
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from atoll.errors import Forbidden
from atoll.service.auth.signing import Signer, base64url, derive_key, from_base64url

if TYPE_CHECKING:
    from atoll.clock import Clock

    Method = Literal["GET", "PUT", "POST"]

MAX_LIFETIME = timedelta(days=7)
MAX_TOKEN = 32 * 1024
"""Characters."""


@dataclass(frozen=True, slots=True)
class Grant:
    method: Method
    session_id: str
    path: str
    filename: str | None = None
    """File name of a download; the name in the workspace if null."""
    upload: str | None = None
    """Key of the blob that a POST copies into the workspace."""
    may_start: bool = True
    """Whether it starts a stopped session. Not so in lists of artifacts, which read keys see."""
    key_id: str | None = None
    """The API key that requested it; null where none is needed. Callers check that it exists."""


class GrantTokens:
    def __init__(self, secret: str, clock: Clock) -> None:
        self._signer = Signer(derive_key(secret, "atoll signed files 1"))
        self._clock = clock

    def make(self, grant: Grant, lifetime: timedelta) -> tuple[str, datetime]:
        """The token and its expiry."""
        expiry = int((self._clock.now() + min(lifetime, MAX_LIFETIME)).timestamp())
        path = grant.path.encode("utf-8", "surrogateescape").decode("latin-1")
        fields = [grant.method, grant.session_id, path, expiry, grant.filename, grant.upload]
        if not grant.may_start or grant.key_id is not None:
            fields += [grant.may_start, grant.key_id]
        body = base64url(json.dumps(fields, separators=(",", ":")).encode())
        return f"{body}.{self._signer.sign(body.encode())}", datetime.fromtimestamp(expiry, UTC)

    def verify(self, token: str, method: str) -> Grant:
        """The grant of a token; `Forbidden` if it is invalid, has expired or is for another use."""
        body, _, signature = token.partition(".")
        if not token.isascii() or len(token) > MAX_TOKEN:
            raise _invalid()
        if not self._signer.verifies(signature, body.encode()):
            raise _invalid()
        try:
            # The signature is ours, but a later version of Atoll may use another shape.
            fields = json.loads(from_base64url(body))
            granted, session_id, path, expiry, filename, upload, *more = fields
            # Tokens of earlier versions lack the last two fields, or only the last one.
            may_start = more[0] if more else True
            key_id = more[1] if len(more) > 1 else None
            raw = path.encode("latin-1").decode("utf-8", "surrogateescape")
        except (ValueError, TypeError, AttributeError, binascii.Error):
            raise _invalid() from None
        if self._clock.now().timestamp() >= expiry:
            raise Forbidden("This link has expired.", code="signed_url_expired")
        if method != granted:
            raise _invalid()
        return Grant(granted, session_id, raw, filename, upload, may_start, key_id)


def _invalid() -> Forbidden:
    return Forbidden(
        "Invalid link: it was not made by this server, or is for another method.",
        code="signed_url_invalid",
    )
