"""
Sends events to a webhook over HTTP. Redirects are not followed, and the body of a response is not
read.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
from httpx import create_ssl_context as create_ssl_context

from atoll.errors import AtollError
from atoll.service.webhooks import delivery
from atoll.service.webhooks.delivery import DeliveryResult, event_out, secret_context, signature
from atoll.service.webhooks.url import parse, resolve
from atoll.version import __version__

if TYPE_CHECKING:
    import ssl

    from atoll.clock import Clock
    from atoll.model.event import Event
    from atoll.model.webhook import Webhook
    from atoll.service.auth.encryption import Encryption
    from atoll.settings import EventSettings

MAX_ERROR = 200
"""Characters."""
IDLE_SECONDS = 30.0
"""How long a connection stays open for the next event."""


class WebhookClient:
    def __init__(
        self, tls: ssl.SSLContext, encryption: Encryption, clock: Clock, settings: EventSettings
    ) -> None:
        self._encryption = encryption
        self._clock = clock
        self._private = settings.webhook_private
        self._client = httpx.AsyncClient(
            verify=tls,
            trust_env=False,
            follow_redirects=False,
            timeout=delivery.TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=1, keepalive_expiry=IDLE_SECONDS),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, webhook: Webhook, event: Event, message_id: str) -> DeliveryResult:
        """Never raises because of the receiver."""
        try:
            async with asyncio.timeout(delivery.TIMEOUT):
                return await self._send(webhook, event, message_id)
        except TimeoutError:
            return DeliveryResult(error=f"No response within {delivery.TIMEOUT:g} s.")
        except AtollError as error:
            return DeliveryResult(error=error.message[:MAX_ERROR])
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return DeliveryResult(error=f"{type(error).__name__}: {error}"[:MAX_ERROR])

    async def _send(self, webhook: Webhook, event: Event, message_id: str) -> DeliveryResult:
        target = parse(webhook.url)
        addresses = await resolve(target, private=self._private, timeout=delivery.TIMEOUT)
        secret = await asyncio.to_thread(
            self._encryption.open, webhook.secret, secret_context(webhook.id)
        )
        if secret is None:
            return DeliveryResult(error="Cannot decrypt the secret: its key is not in secrets.key.")
        body = json.dumps(event_out(event), separators=(",", ":")).encode()
        timestamp = int(self._clock.now().timestamp())
        headers = {
            "host": target.authority,
            "content-type": "application/json",
            "user-agent": f"atoll/{__version__}",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(secret, message_id, timestamp, body),
        }
        refused: httpx.ConnectError | None = None
        for address in addresses:
            try:
                # The certificate must be that of the host name.
                async with self._client.stream(
                    "POST",
                    target.at(address),
                    content=body,
                    headers=headers,
                    extensions={"sni_hostname": target.host},
                ) as response:
                    return _result_of(response.status_code)
            except httpx.ConnectError as error:
                refused = error
        assert refused is not None
        raise refused


def _result_of(status: int) -> DeliveryResult:
    if 200 <= status < 300:
        return DeliveryResult(status)
    if 300 <= status < 400:
        return DeliveryResult(status, f"Response status {status}; redirects are not followed.")
    return DeliveryResult(status, f"Response status {status}.")
