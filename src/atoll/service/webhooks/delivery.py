"""
What is sent to a webhook, and its signature. A response with status 200 to 299 acknowledges it.

The headers are those of Standard Webhooks: `webhook-id`, the same in every attempt,
`webhook-timestamp` of the attempt, and `webhook-signature`, an HMAC-SHA256 of both and the body.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

    from atoll.clock import Clock
    from atoll.model.event import Event
    from atoll.service.auth.encryption import Encryption
    from atoll.service.webhooks.client import WebhookClient
    from atoll.settings import EventSettings

SECRET_PREFIX = "whsec_"  # noqa: S105
TIMEOUT = 10.0
"""Seconds that a webhook may take to answer."""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of one attempt."""

    status: int | None = None
    error: str | None = None
    """Null if the event was acknowledged."""


def event_out(event: Event) -> dict[str, Any]:
    return {
        "number": event.number,
        "type": event.type,
        "subject": event.subject,
        "at": event.at.isoformat().replace("+00:00", "Z"),
        "data": event.data,
    }


def secret_context(webhook_id: str) -> str:
    return f"webhook:{webhook_id}"


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


class WebhookSender:
    """
    Makes the HTTP clients of webhooks, which are imported with the first: most processes have no
    webhooks.
    """

    def __init__(self, encryption: Encryption, clock: Clock, settings: EventSettings) -> None:
        self._encryption = encryption
        self._clock = clock
        self._settings = settings
        self._tls: ssl.SSLContext | None = None

    async def client(self) -> WebhookClient:
        """One per webhook: open connections of another one belong to another host name."""
        from atoll.service.webhooks.client import WebhookClient, create_ssl_context

        if self._tls is None:
            self._tls = await asyncio.to_thread(create_ssl_context)
        return WebhookClient(self._tls, self._encryption, self._clock, self._settings)
