"""
Deliveries to webhooks: each has a worker of its own, on one replica at a time, by a lease.

So one that is slow or away holds up no other. Events go in order, each until it is taken or given
up after `event.webhook_retries`; then the next. How far it is, is stored after each page, each
second and each failure: whoever goes on after a crash sends at most what was sent in the last
second again, under the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, TemporaryError
from atoll.service.events.service import POLL_SECONDS, wait_for
from atoll.service.webhooks.service import CHANGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.model.event import Event, FeedPage
    from atoll.model.webhook import Deliveries, Webhook
    from atoll.service.events.service import Feed
    from atoll.service.replica import Replica
    from atoll.service.webhooks.delivery import DeliveryResult, WebhookClient, WebhookSender
    from atoll.settings import EventSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
LONGEST_PAUSE = timedelta(minutes=5)
SAVE_SECONDS = 1.0
IDLE_SAVE_SECONDS = 60.0
"""How often it is stored how far one is that is told of nothing."""


def pause_after(failures: int) -> timedelta:
    """Before the next try, after so many that failed."""
    return min(timedelta(seconds=2.0 ** min(failures - 1, 16)), LONGEST_PAUSE)


class WebhookReconciler:
    """Sees to it that each webhook has a worker, here or on another replica."""

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
            while True:
                try:
                    async with self._coordination.listen(CHANGED) as heard:
                        while True:
                            await self._look(group)
                            await heard.wait(POLL_SECONDS)
                except Exception as error:
                    log.warning("webhooks.not_seen", error=str(error), exc_info=_unknown(error))
                    await asyncio.sleep(AGAIN_SECONDS)

    async def _look(self, group: asyncio.TaskGroup) -> None:
        webhooks = await self._store.webhooks.all()
        for worker in self._workers.values():
            worker.look.set()
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
        except Exception as error:  # The next look starts another.
            log.warning(
                "webhook.interrupted",
                webhook_id=worker.webhook_id,
                error=str(error),
                exc_info=_unknown(error),
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
        self.look = asyncio.Event()
        """Set when the webhook may have been changed or removed."""
        self._store = store
        self._feed = feed
        self._sender = sender
        self._clock = clock
        self._retries = settings.webhook_retries
        self._place = 0
        """How far it is; what is stored may be behind."""
        self._saved_at = clock.monotonic()

    async def run(self) -> None:
        """Until it is removed or switched off."""
        client = await self._sender.client()
        try:
            while True:
                self.look.clear()
                webhook = await self._store.webhooks.get(self.webhook_id)
                if webhook is None or not webhook.enabled:
                    return
                self._place = max(self._place, webhook.delivered)
                retry_at = webhook.deliveries.retry_at
                if retry_at is not None and retry_at > self._clock.now():
                    left = (retry_at - self._clock.now()).total_seconds()
                    await wait_for(self.look, left)
                else:
                    await self._go_on(webhook, client)
        finally:
            await client.close()

    async def _go_on(self, webhook: Webhook, client: WebhookClient) -> None:
        news = self._feed.changed
        stretch = await self._store.events.after(self._place, types=webhook.types)
        if stretch.first > self._place + 1:
            await self._missed(stretch)
        elif stretch.events:
            await self._send(webhook, stretch, client)
        else:
            nothing_more = stretch.through == self._place
            self._place = stretch.through
            if self._place > webhook.delivered and self._due(IDLE_SAVE_SECONDS):
                await self._save()
            if nothing_more:
                await self._wait(news)

    async def _wait(self, news: asyncio.Event) -> None:
        """For an event or a change of the webhook."""
        waits = [asyncio.ensure_future(each.wait()) for each in (news, self.look)]
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
            if self.look.is_set():
                break
            result = await client.send(webhook, event, f"{webhook.id}_{event.number}")
            if result.error is not None:
                await self._failed(webhook, event, failures + 1, result)
                return
            self._place = event.number
            if failures or self._due(SAVE_SECONDS):
                await self._delivered(result)
                failures = 0
        else:
            self._place = stretch.through
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
            self._place = event.number
        log.info(
            "webhook.gave_up" if given_up else "webhook.failed",
            webhook_id=webhook.id,
            number=event.number,
            failures=failures,
            error=result.error,
        )

        def noted(found: Webhook) -> Deliveries:
            # One that was given another address meanwhile is tried there at once.
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

        await self._save(noted)

    async def _missed(self, stretch: FeedPage) -> None:
        """Events are gone that it was not told of."""
        count = stretch.first - 1 - self._place
        self._place = stretch.first - 1
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
        self, noted: Callable[[Webhook], Deliveries] = lambda found: found.deliveries
    ) -> None:
        """How far it is; whatever else is changed of it meanwhile stays."""
        while (found := await self._store.webhooks.get(self.webhook_id)) is not None:
            following = dataclasses.replace(
                found,
                delivered=max(found.delivered, self._place),
                deliveries=noted(found),
            )
            try:
                await self._store.webhooks.save(following)
                break
            except Conflict:
                continue
        self._saved_at = self._clock.monotonic()


def _unknown(error: Exception) -> Exception | None:
    """The error, if more is to be told of it than its words."""
    return None if isinstance(error, TemporaryError) else error
