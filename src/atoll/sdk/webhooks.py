"""Webhooks: URLs that receive events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.arguments import given
from atoll.sdk.paths import url_segment
from atoll.sdk.values import WebhookInfo, WebhookTest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from atoll.sdk.http_client import HttpClient

_TEST_TIMEOUT = 30.0
"""Seconds beyond the usual timeout: the server waits for the receiver."""


class AsyncWebhooks:
    """All webhooks of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def create(
        self,
        url: str,
        *,
        types: Sequence[str] = (),
        secret: str | None = None,
        enabled: bool = True,
    ) -> WebhookInfo:
        """
        Send events from now on to `url`: all of them, or those of `types` such as
        "session.stopped" or "session.*".

        Deliveries are signed with `secret`: "whsec_" and 24 to 64 bytes as base64. Without one the
        server generates it and returns it only here. Receivers check signatures with
        `atoll.verify_webhook`.
        """
        body = given(url=url, types=list(types), secret=secret, enabled=enabled)
        return await self._http.fetch(WebhookInfo, "POST", "webhooks", body=body)

    async def get(self, webhook_id: str) -> WebhookInfo:
        return await self._http.fetch(WebhookInfo, "GET", f"webhooks/{url_segment(webhook_id)}")

    def list(self) -> AsyncIterator[WebhookInfo]:
        """Oldest first."""
        return self._http.items(WebhookInfo, "webhooks")

    async def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        types: Sequence[str] | None = None,
        secret: str | None = None,
        enabled: bool | None = None,
    ) -> WebhookInfo:
        """Change the given fields. Pending retries are sent at once."""
        chosen = None if types is None else list(types)
        body = given(url=url, types=chosen, secret=secret, enabled=enabled)
        path = f"webhooks/{url_segment(webhook_id)}"
        return await self._http.fetch(WebhookInfo, "PATCH", path, body=body)

    async def delete(self, webhook_id: str) -> None:
        await self._http.call("DELETE", f"webhooks/{url_segment(webhook_id)}")

    async def test(self, webhook_id: str) -> WebhookTest:
        """Send a `webhook.test` event now, once."""
        path = f"webhooks/{url_segment(webhook_id)}/test"
        return await self._http.fetch(WebhookTest, "POST", path, wait=_TEST_TIMEOUT)
