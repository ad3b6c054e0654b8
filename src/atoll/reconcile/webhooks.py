"""
Delivers events to webhooks: each webhook has its own worker, on one replica at a time (lease).

So a slow or unreachable webhook delays no other. Events are delivered in order; each is retried
until it is accepted or `event.webhook_retries` are used up. The position is stored after each page,
each second and each failure: after a crash the successor repeats at most the deliveries of the last
second, with the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError, VersionConflict
from atoll.reconcile.sweep import sweep_on_notify
from atoll.service.events.service import POLL_SECONDS, wait_for
from atoll.service.webhooks.service import CHANGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.model.event import Event, FeedPage
    from atoll.model.webhook import Deliveries, Webhook
    from atoll.service.events.service import Feed
    from atoll.service.replica import Replica
    from atoll.service.webhooks.client import WebhookClient
    from atoll.service.webhooks.delivery import DeliveryResult, WebhookSender
    from atoll.settings import EventSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

MAX_PAUSE = timedelta(minutes=5)
SAVE_INTERVAL = 1.0
IDLE_SAVE_INTERVAL = 60.0
"""Seconds between two saves of the position of a webhook that gets no events."""


def pause_after(failures: int) -> timedelta:
    """Pause before the next retry."""
    return min(timedelta(seconds=2.0 ** min(failures - 1, 16)), MAX_PAUSE)


class WebhookReconciler:
    """Keeps one worker per webhook, on this or another replica."""

    def __init__(
        self, replica: Replica, feed: Feed, sender: WebhookSender, settings: EventSettings
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._clock = replica.clock
        self._feed = feed
        self._sender = sender
        self._settings = settings
        self._workers: dict[str, Worker] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            start = partial(self._start_workers, group)
            await sweep_on_notify(
                "webhooks.outage", self._coordination, CHANGED, POLL_SECONDS, start
            )

    async def _start_workers(self, group: asyncio.TaskGroup) -> None:
        webhooks = await self._store.webhooks.all()
        for worker in self._workers.values():
            worker.changed.set()
        for webhook in webhooks:
            if webhook.enabled and webhook.id not in self._workers:
                worker = Worker(
                    webhook.id, self._store, self._feed, self._sender, self._clock, self._settings
                )
                self._workers[webhook.id] = worker
                group.create_task(self._work(worker), name=f"webhook {webhook.id}")

    async def _work(self, worker: Worker) -> None:
        try:
            lease = await self._leases.try_lease(f"webhook:{worker.webhook_id}")
            if lease is not None:
                async with lease:
                    await worker.run()
        except Exception as error:  # The next round starts another.
            log.warning(
                "webhook.interrupted",
                webhook_id=worker.webhook_id,
                error=str(error),
                exc_info=None if isinstance(error, TemporaryError) else error,
            )
        finally:
            del self._workers[worker.webhook_id]


class Worker:
    def __init__(
        self,
        webhook_id: str,
        store: Store,
        feed: Feed,
        sender: WebhookSender,
        clock: Clock,
        settings: EventSettings,
    ) -> None:
        self.webhook_id = webhook_id
        self.changed = asyncio.Event()
        """Set when the webhook may have been changed or deleted."""
        self._store = store
        self._feed = feed
        self._sender = sender
        self._clock = clock
        self._retries = settings.webhook_retries
        self._position = 0
        """Number of the last handled event; the stored one may be older."""
        self._saved_at = clock.monotonic()

    async def run(self) -> None:
        """Deliver until the webhook is deleted or disabled."""
        client = await self._sender.client()
        try:
            while True:
                self.changed.clear()
                webhook = await self._store.webhooks.get(self.webhook_id)
                if webhook is None or not webhook.enabled:
                    return
                self._position = max(self._position, webhook.delivered)
                retry_at = webhook.deliveries.retry_at
                if retry_at is not None and retry_at > self._clock.now():
                    left = (retry_at - self._clock.now()).total_seconds()
                    await wait_for(self.changed, left)
                else:
                    await self._deliver_next(webhook, client)
        finally:
            await client.close()

    async def _deliver_next(self, webhook: Webhook, client: WebhookClient) -> None:
        news = self._feed.changed
        stretch = await self._store.events.after(self._position, types=webhook.types)
        if stretch.first > self._position + 1:
            await self._missed(stretch)
        elif stretch.events:
            await self._send(webhook, stretch, client)
        else:
            nothing_more = stretch.through == self._position
            self._position = stretch.through
            if self._position > webhook.delivered and self._due(IDLE_SAVE_INTERVAL):
                await self._save()
            if nothing_more:
                await self._wait(news)

    async def _wait(self, news: asyncio.Event) -> None:
        """Wait for an event or a change of the webhook."""
        waits = [asyncio.ensure_future(each.wait()) for each in (news, self.changed)]
        try:
            await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _send(self, webhook: Webhook, stretch: FeedPage, client: WebhookClient) -> None:
        failures = webhook.deliveries.failures
        result: DeliveryResult | None = None
        for event in stretch.events:
            assert event.number is not None
            if self.changed.is_set():
                break
            result = await client.send(webhook, event, f"{webhook.id}_{event.number}")
            if result.error is not None:
                await self._failed(webhook, event, failures + 1, result)
                return
            self._position = event.number
            if failures or self._due(SAVE_INTERVAL):
                await self._delivered(result)
                failures = 0
        else:
            self._position = stretch.through
        if result is not None:
            await self._delivered(result)

    async def _delivered(self, result: DeliveryResult) -> None:
        now = self._clock.now()
        await self._save(
            lambda found: dataclasses.replace(
                found.deliveries,
                failures=0,
                retry_at=None,
                last_status=result.status,
                last_error=None,
                last_at=now,
            )
        )

    async def _failed(
        self, webhook: Webhook, event: Event, failures: int, result: DeliveryResult
    ) -> None:
        assert event.number is not None
        now = self._clock.now()
        given_up = failures > self._retries
        if given_up:
            self._position = event.number
        log.info(
            "webhook.gave_up" if given_up else "webhook.failed",
            webhook_id=webhook.id,
            number=event.number,
            failures=failures,
            error=result.error,
        )

        def updated(found: Webhook) -> Deliveries:
            # A webhook with a new address is tried there at once.
            waits = not given_up and (found.url, found.secret) == (webhook.url, webhook.secret)
            return dataclasses.replace(
                found.deliveries,
                failures=failures if waits else 0,
                gave_up=found.deliveries.gave_up + given_up,
                retry_at=now + pause_after(failures) if waits else None,
                last_status=result.status,
                last_error=result.error,
                last_at=now,
            )

        await self._save(updated)

    async def _missed(self, stretch: FeedPage) -> None:
        """Record events that expired before they were delivered."""
        count = stretch.first - 1 - self._position
        self._position = stretch.first - 1
        log.warning("webhook.missed", webhook_id=self.webhook_id, events=count)
        await self._save(
            lambda found: dataclasses.replace(
                found.deliveries,
                failures=0,
                retry_at=None,
                missed=found.deliveries.missed + count,
            )
        )

    def _due(self, seconds: float) -> bool:
        return self._clock.monotonic() - self._saved_at >= seconds

    async def _save(
        self, updated: Callable[[Webhook], Deliveries] = lambda found: found.deliveries
    ) -> None:
        """Store the position; concurrent changes of the webhook are kept."""
        while (found := await self._store.webhooks.get(self.webhook_id)) is not None:
            following = dataclasses.replace(
                found,
                delivered=max(found.delivered, self._position),
                deliveries=updated(found),
            )
            try:
                await self._store.webhooks.save(following)
                break
            except VersionConflict:
                continue
        self._saved_at = self._clock.monotonic()
