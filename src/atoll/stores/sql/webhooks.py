"""
Webhooks.

`add` and `save` may be repeated. `remove` may not: a second one would say that nothing was there.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from atoll.model.webhook import Deliveries, Webhook
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    decode,
    encode,
    insert,
    insert_again,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO webhooks (id, created_at, url, secret, types, delivered, state, version)
    VALUES (:id, :created_at, :url, :secret, :types, :delivered, :state, :version)
"""
_GET = "SELECT * FROM webhooks WHERE id = :id"
_SAVE = """
    UPDATE webhooks SET
        url = :url, secret = :secret, types = :types, delivered = :delivered, state = :state,
        version = :version + 1
    WHERE id = :id AND version = :version
"""
_ALL = "SELECT * FROM webhooks ORDER BY created_at, id"
_REMOVE = "DELETE FROM webhooks WHERE id = :id"
_TIMES = ("last_at", "retry_at")


class SqlWebhooks:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, webhook: Webhook) -> None:
        row = _row(webhook)
        await self._engine.write(
            lambda connection: insert(connection, _ADD, row, "Webhook"),
            again=lambda connection: insert_again(connection, _ADD, _GET, row, "Webhook"),
        )

    async def get(self, webhook_id: str) -> Webhook | None:
        def read(connection: Connection) -> Webhook | None:
            row = connection.execute(_GET, {"id": webhook_id}).fetchone()
            return None if row is None else _webhook(row)

        return await self._engine.read(read)

    async def save(self, webhook: Webhook) -> Webhook:
        row = _row(webhook)
        await self._engine.write(
            lambda connection: compare_and_set(connection, _SAVE, row, "Webhook"),
            again=lambda connection: compare_and_set_again(connection, _SAVE, _GET, row, "Webhook"),
        )
        return replace(webhook, version=webhook.version + 1)

    async def all(self) -> list[Webhook]:
        return await self._engine.read(
            lambda connection: [_webhook(row) for row in connection.execute(_ALL)]
        )

    async def remove(self, webhook_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": webhook_id}).rowcount > 0
        )


def _row(webhook: Webhook) -> dict[str, Any]:
    deliveries = asdict(webhook.deliveries)
    state = deliveries | {name: optional_micros(deliveries[name]) for name in _TIMES}
    return {
        "id": webhook.id,
        "created_at": micros(webhook.created_at),
        "url": encode(webhook.url),
        "secret": encode(webhook.secret),
        "types": encode(webhook.types),
        "delivered": webhook.delivered,
        "state": encode({**state, "enabled": webhook.enabled}),
        "version": webhook.version,
    }


def _webhook(row: Row) -> Webhook:
    state = decode(row["state"])
    enabled = state.pop("enabled")
    times = {name: optional_moment(state[name]) for name in _TIMES}
    return Webhook(
        id=row["id"],
        created_at=moment(row["created_at"]),
        url=decode(row["url"]),
        secret=decode(row["secret"]),
        types=tuple(decode(row["types"])),
        delivered=row["delivered"],
        enabled=enabled,
        deliveries=Deliveries(**{**state, **times}),
        version=row["version"],
    )
