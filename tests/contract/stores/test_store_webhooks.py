"""Webhooks: few, changed by compare-and-set."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.errors import Conflict
from atoll.model.webhook import Deliveries, Webhook

from .store_entities import NOW, ODD_TEXT

if TYPE_CHECKING:
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio

DELIVERIES = Deliveries(
    failures=3,
    gave_up=2,
    missed=1,
    last_status=500,
    last_error=ODD_TEXT,
    last_at=NOW,
    retry_at=NOW + timedelta(seconds=1),
)


def webhook(number: int = 0) -> Webhook:
    return Webhook(
        id=f"hook_{number}",
        created_at=NOW + timedelta(seconds=number),
        url=f"https://example.com/{ODD_TEXT}",
        secret="1:sealed",
        types=("session.*", "execution.failed"),
        delivered=2**40,
        enabled=False,
        deliveries=DELIVERIES,
    )


async def test_a_webhook_is_stored_unchanged(store: Store) -> None:
    one = webhook()
    plain = replace(webhook(1), types=(), enabled=True, deliveries=Deliveries())
    await store.webhooks.add(one)
    await store.webhooks.add(plain)

    assert await store.webhooks.get(one.id) == one
    assert await store.webhooks.all() == [one, plain]
    with pytest.raises(Conflict):
        await store.webhooks.add(one)


async def test_one_of_two_changes_of_the_same_version_is_refused(store: Store) -> None:
    one = webhook()
    await store.webhooks.add(one)

    saved = await store.webhooks.save(replace(one, delivered=7, enabled=True, types=("a.b",)))

    assert saved == await store.webhooks.get(one.id)
    assert saved.version == 2
    with pytest.raises(Conflict):
        await store.webhooks.save(one)


async def test_remove_returns_whether_it_existed(store: Store) -> None:
    one = webhook()
    await store.webhooks.add(one)

    assert await store.webhooks.remove(one.id) is True
    assert await store.webhooks.remove(one.id) is False
    assert await store.webhooks.get(one.id) is None
    with pytest.raises(Conflict):
        await store.webhooks.save(one)
