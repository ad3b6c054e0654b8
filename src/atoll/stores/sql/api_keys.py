"""
API keys, by the digest of their secret.

`remove` is not repeatable: a second attempt would find nothing and report that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.api_key import ApiKey
from atoll.stores.sql import tables
from atoll.stores.sql.events import add_event
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records
from atoll.stores.sql.writes import find_or_insert, insert

if TYPE_CHECKING:
    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection

MAPPER = Mapper(ApiKey, tables.API_KEYS)
_KNOWN = "SELECT 1 FROM api_keys WHERE digest = :digest"
_ALL = "SELECT * FROM api_keys ORDER BY created_at, id"


class SqlApiKeys(Records[ApiKey]):
    mapper = MAPPER
    noun = "Key"

    async def add(self, key: ApiKey, *, event: Event | None = None) -> None:
        row = MAPPER.row(key)

        def write(connection: Connection) -> None:
            if connection.execute(_KNOWN, row).fetchone() is None:
                insert(connection, MAPPER.insert, row, "Key")
                add_event(connection, event)

        await find_or_insert(self._engine, write)

    async def all(self) -> list[ApiKey]:
        return await self._list(_ALL)

    async def remove(self, key_id: str) -> bool:
        return await self._remove(key_id)
