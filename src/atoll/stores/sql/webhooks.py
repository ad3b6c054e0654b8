"""Webhooks. `remove` is not repeatable: a second attempt would find nothing and report that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.webhook import Deliveries, Webhook
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import ObjectCodec, decode, encode
from atoll.stores.sql.mapper import Mapper, Special, Values
from atoll.stores.sql.records import Records

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Row

_DELIVERIES = ObjectCodec(Deliveries)


def _write(webhook: Webhook) -> Values:
    state = {**_DELIVERIES.write(webhook.deliveries), "enabled": webhook.enabled}
    return {"state": encode(state)}


def _read(row: Row) -> Values:
    state = decode(row["state"])
    return {"enabled": state["enabled"], "deliveries": _DELIVERIES.read(state)}


MAPPER = Mapper(
    Webhook,
    tables.WEBHOOKS,
    special=Special(columns={"state"}, write=_write, fields={"enabled", "deliveries"}, read=_read),
)
_ALL = "SELECT * FROM webhooks ORDER BY created_at, id"


class SqlWebhooks(Records[Webhook]):
    mapper = MAPPER
    noun = "Webhook"

    async def all(self) -> list[Webhook]:
        return await self._list(_ALL)

    async def remove(self, webhook_id: str) -> bool:
        return await self._remove(webhook_id)
