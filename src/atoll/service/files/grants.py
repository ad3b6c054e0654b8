"""
Grants by which whoever has them may do one thing to one file for a while, without a key.

A grant is a token that names the method, the session, the path, its end, what a download is called
and the API key that asked for it, and is signed with a key made of the database's secret: every
replica can make and check them, and none is stored. Nothing else can be done with it. It is no API
key and no instance's token, and neither of these is one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from atoll.errors import Forbidden

if TYPE_CHECKING:
    from atoll.clock import Clock

    Method = Literal["GET", "PUT", "POST"]

LONGEST = timedelta(days=7)
_PURPOSE = b"atoll signed files 1"
_MAX_TOKEN = 32 * 1024


@dataclass(frozen=True, slots=True)
class Grant:
    method: Method
    session_id: str
    path: str
    filename: str | None = None
    """What a download is called; the file's own name when not set."""
    upload: str | None = None
    """The object that a POST brings into the workspace."""
    may_start: bool = True
    """Whether it starts a stopped session. Links in lists do not: a read key gets those."""
    key_id: str | None = None
    """The API key that asked for it; null where none is needed. For others to check."""


class GrantTokens:
    def __init__(self, secret: str, clock: Clock) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE, "sha256")
        self._clock = clock

    def make(self, grant: Grant, life: timedelta) -> tuple[str, datetime]:
        """The token, and when it ends."""
        end = int((self._clock.now() + min(life, LONGEST)).timestamp())
        path = grant.path.encode("utf-8", "surrogateescape").decode("latin-1")
        fields = [grant.method, grant.session_id, path, end, grant.filename, grant.upload]
        if not grant.may_start or grant.key_id is not None:
            fields += [grant.may_start, grant.key_id]
        body = _text(json.dumps(fields, separators=(",", ":")).encode())
        return f"{body}.{self._signature(body)}", datetime.fromtimestamp(end, UTC)

    def read(self, token: str, method: str) -> Grant:
        """What a token grants; `Forbidden` when it is none, is over, or is for something else."""
        body, _, signature = token.partition(".")
        if not token.isascii() or len(token) > _MAX_TOKEN:
            raise _invalid()
        if not hmac.compare_digest(self._signature(body), signature):
            raise _invalid()
        try:
            # Nobody else signed it; but a token of a later Atoll may have another shape.
            fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            granted, session_id, path, end, filename, upload, *more = fields
            # Those of an earlier Atoll have none of the last two, or only the first.
            may_start = more[0] if more else True
            key_id = more[1] if len(more) > 1 else None
            raw = path.encode("latin-1").decode("utf-8", "surrogateescape")
        except (ValueError, TypeError, AttributeError, binascii.Error):
            raise _invalid() from None
        if self._clock.now().timestamp() >= end:
            raise Forbidden("This link has expired.", code="signed_url_expired")
        if method != granted:
            raise _invalid()
        return Grant(granted, session_id, raw, filename, upload, may_start, key_id)

    def _signature(self, body: str) -> str:
        return _text(hmac.new(self._key, body.encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _invalid() -> Forbidden:
    return Forbidden(
        "This link is not one of this server, or is for something else.", code="signed_url_invalid"
    )
