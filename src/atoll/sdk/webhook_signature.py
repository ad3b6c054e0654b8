"""Whether a request that comes as a webhook's is one: for those who receive them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest, Unauthenticated
from atoll.sdk.decode import decode
from atoll.sdk.values import FeedEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECRET = "whsec_"  # noqa: S105 - how secrets begin
_TOLERANCE = 300.0


def verify_webhook(
    body: bytes, headers: Mapping[str, str], secret: str, *, tolerance: float = _TOLERANCE
) -> FeedEvent:
    """
    The event that a request brings, if it was signed with `secret` at most `tolerance` seconds ago;
    raises `Unauthenticated` otherwise.

    `body` is the request's as it came, byte for byte. The same event may come more than once, with
    the same `webhook-id`.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    signatures = given.get("webhook-signature", "")
    if not message_id or not timestamp.isascii() or not timestamp.isdigit():
        raise _refused("it has no id or time")
    if abs(time.time() - int(timestamp)) > tolerance:
        raise _refused("it is too old, or the clocks differ")
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET), validate=True)
    except ValueError:
        raise InvalidRequest(f"A secret is {_SECRET} and base64.", code="bad_secret") from None
    signed = f"{message_id}.{timestamp}.".encode() + body
    expected = b"v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())
    fits = [hmac.compare_digest(expected, one.encode()) for one in signatures.split(" ")]
    if not any(fits):
        raise _refused("its signature is not that of this secret")
    try:
        return decode(FeedEvent, json.loads(body))
    except ValueError:
        raise _refused("it is no event") from None


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"This is no delivery of the webhook: {why}.", code="bad_signature")
