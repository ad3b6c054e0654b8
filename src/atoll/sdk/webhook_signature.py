"""Signature check for receivers of webhooks."""

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

_SECRET = "whsec_"  # noqa: S105 - prefix of secrets
_TOLERANCE = 300.0


def verify_webhook(
    body: bytes, headers: Mapping[str, str], secret: str, *, tolerance: float = _TOLERANCE
) -> FeedEvent:
    """
    Check the signature of a webhook request and return its event. Raises `Unauthenticated` unless
    it was signed with `secret` at most `tolerance` seconds ago.

    `body` must be the unmodified bytes of the request. An event may be delivered more than once,
    with the same `webhook-id`.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp = lower.get("webhook-id", ""), lower.get("webhook-timestamp", "")
    signatures = lower.get("webhook-signature", "")
    if not message_id or not timestamp.isascii() or not timestamp.isdigit():
        raise _refused("the webhook-id or webhook-timestamp header is missing")
    if abs(time.time() - int(timestamp)) > tolerance:
        raise _refused("the timestamp is too old or too new")
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET), validate=True)
    except ValueError:
        raise InvalidRequest(
            f"The secret must be {_SECRET} followed by base64.", code="bad_secret"
        ) from None
    signed = f"{message_id}.{timestamp}.".encode() + body
    expected = b"v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())
    matches = [hmac.compare_digest(expected, one.encode()) for one in signatures.split(" ")]
    if not any(matches):
        raise _refused("the signature does not match the secret")
    try:
        return decode(FeedEvent, json.loads(body))
    except ValueError:
        raise _refused("the body is not an event") from None


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"Invalid webhook request: {why}.", code="bad_signature")
