"""
Create, change, remove and test webhooks.

A secret is stored encrypted, and only the response that creates it contains it.
`reconcile/webhooks.py` delivers events.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import secrets
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotFound,
    TemporaryError,
    VersionConflict,
)
from atoll.model.event import Event
from atoll.model.webhook import MAX_WEBHOOKS, Webhook
from atoll.service.webhooks import delivery
from atoll.service.webhooks.delivery import SECRET_PREFIX, secret_context
from atoll.service.webhooks.url import parse, resolve

if TYPE_CHECKING:
    from atoll.service.auth.encryption import Encryption
    from atoll.service.events.service import Feed
    from atoll.service.replica import Replica
    from atoll.service.webhooks.delivery import DeliveryResult, WebhookSender
    from atoll.settings import EventSettings

log = structlog.get_logger(__name__)

CHANGED = "webhooks"
"""Topic on which a replica publishes that it has changed a webhook."""
MIN_SECRET, MAX_SECRET = 24, 64
"""Bytes."""
MAX_ATTEMPTS = 10


class Webhooks:
    def __init__(
        self,
        replica: Replica,
        feed: Feed,
        sender: WebhookSender,
        encryption: Encryption,
        settings: EventSettings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._feed = feed
        self._sender = sender
        self._encryption = encryption
        self._settings = settings

    async def create(
        self,
        url: str,
        types: tuple[str, ...],
        secret: str | None,
        *,
        enabled: bool = True,
        seed: ids.Seed | None = None,
    ) -> tuple[Webhook, str | None]:
        """Returns the secret too if it was generated. Delivery begins with the next event."""
        if secret is None and seed is not None:
            raise InvalidRequest(
                "secret: required with an Idempotency-Key, because the response is stored, and a "
                "generated secret would be stored with it.",
                field="secret",
            )
        if secret is not None:
            _check_secret(secret)
        await self._check_url(url)
        webhook_id = ids.webhook_id(seed)
        if len(await self._store.webhooks.all()) >= MAX_WEBHOOKS:
            raise Conflict(
                f"There are {MAX_WEBHOOKS} webhooks; remove one first.",
                code="too_many_webhooks",
            )
        made = None if secret is not None else _new_secret()
        webhook = Webhook(
            id=webhook_id,
            created_at=self._clock.now(),
            url=url,
            secret=await self._sealed(webhook_id, secret or made or ""),
            types=types,
            delivered=await self._feed.end(),
            enabled=enabled,
        )
        try:
            await self._store.webhooks.add(webhook)
        except AlreadyExists:
            # Created by an earlier request with the same key, whose response was lost.
            return await self.get(webhook_id), None
        await self._notify()
        return webhook, made

    async def list(self) -> list[Webhook]:
        return await self._store.webhooks.all()

    async def get(self, webhook_id: str) -> Webhook:
        found = await self._store.webhooks.get(webhook_id)
        if found is None:
            raise NotFound(f"There is no webhook {webhook_id}.", code="webhook_not_found")
        return found

    async def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        types: tuple[str, ...] | None = None,
        secret: str | None = None,
        enabled: bool | None = None,
    ) -> Webhook:
        """A delivery that waits for a retry is attempted at once."""
        if secret is not None:
            _check_secret(secret)
        if url is not None:
            await self._check_url(url)
        sealed = None if secret is None else await self._sealed(webhook_id, secret)
        given = {"url": url, "types": types, "secret": sealed, "enabled": enabled}
        changes = {name: value for name, value in given.items() if value is not None}
        for _ in range(MAX_ATTEMPTS):
            found = await self.get(webhook_id)
            deliveries = dataclasses.replace(found.deliveries, failures=0, retry_at=None)
            changed = dataclasses.replace(found, deliveries=deliveries, **changes)  # type: ignore[arg-type]
            with contextlib.suppress(VersionConflict):
                saved = await self._store.webhooks.save(changed)
                await self._notify()
                return saved
        raise TemporaryError(f"Webhook {webhook_id} is being updated by other requests; try again.")

    async def remove(self, webhook_id: str) -> None:
        if not await self._store.webhooks.remove(webhook_id):
            raise NotFound(f"There is no webhook {webhook_id}.", code="webhook_not_found")
        await self._notify()

    async def test(self, webhook_id: str) -> DeliveryResult:
        """Send an event that is not in the feed, once."""
        webhook = await self.get(webhook_id)
        event = Event("webhook.test", webhook.id, self._clock.now())
        client = await self._sender.client()
        try:
            return await client.send(webhook, event, f"{webhook.id}_test_{secrets.token_hex(8)}")
        finally:
            await client.close()

    async def _check_url(self, url: str) -> None:
        await resolve(parse(url), private=self._settings.webhook_private, timeout=delivery.TIMEOUT)

    async def _sealed(self, webhook_id: str, secret: str) -> str:
        return await asyncio.to_thread(self._encryption.seal, secret, secret_context(webhook_id))

    async def _notify(self) -> None:
        try:
            await self._coordination.notify(CHANGED)
        except TemporaryError as error:
            # They poll as well.
            log.info("webhooks.not_published", error=error.message)


def _new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _check_secret(secret: str) -> None:
    try:
        length = len(base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True))
    except ValueError:
        length = 0
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET <= length <= MAX_SECRET:
        raise InvalidRequest(
            f"secret: must be {SECRET_PREFIX} and {MIN_SECRET} to {MAX_SECRET} bytes in base64.",
            field="secret",
        )
