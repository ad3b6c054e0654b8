"""Webhooks: addresses that are told of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.paths import url_segment
from atoll.sdk.values import WebhookInfo, WebhookTest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from atoll.sdk.http_client import HttpClient

# Longer than the server lets an address take to answer, unless it is set otherwise.
_TEST_SECONDS = 30.0


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
        Have `url` told of what changes from now on: all of it, or events of `types`, like
        "session.stopped" or "session.*".

        What is sent is signed with `secret`, "whsec_" and 24 to 64 bytes as base64. Without one it
        is made, and is in this answer and in no other. `atoll.verify_webhook` checks it.
        """
        body = {"url": url, "types": list(types), "enabled": enabled}
        if secret is not None:
            body["secret"] = secret
        return decode(WebhookInfo, await self._http.call("POST", "webhooks", body=body))

    async def get(self, webhook_id: str) -> WebhookInfo:
        answer = await self._http.call("GET", f"webhooks/{url_segment(webhook_id)}")
        return decode(WebhookInfo, answer)

    async def list(self) -> AsyncIterator[WebhookInfo]:
        """Oldest first."""
        answer = await self._http.call("GET", "webhooks")
        for item in answer["items"]:
            yield decode(WebhookInfo, item)

    async def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        types: Sequence[str] | None = None,
        secret: str | None = None,
        enabled: bool | None = None,
    ) -> WebhookInfo:
        """Change what is given. What waits to be tried again is tried at once."""
        body = {
            "url": url,
            "types": None if types is None else list(types),
            "secret": secret,
            "enabled": enabled,
        }
        given = {name: value for name, value in body.items() if value is not None}
        path = f"webhooks/{url_segment(webhook_id)}"
        return decode(WebhookInfo, await self._http.call("PATCH", path, body=given))

    async def delete(self, webhook_id: str) -> None:
        await self._http.call("DELETE", f"webhooks/{url_segment(webhook_id)}")

    async def test(self, webhook_id: str) -> WebhookTest:
        """Have an event `webhook.test` sent to it now, once."""
        path = f"webhooks/{url_segment(webhook_id)}/test"
        answer = await self._http.call("POST", path, wait=_TEST_SECONDS)
        return decode(WebhookTest, answer)
