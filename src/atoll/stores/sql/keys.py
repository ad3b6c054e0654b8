"""
API keys, by the digest of their secret.

`remove` is not repeatable: a second attempt would find nothing and report that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import AlreadyExists
from atoll.model.key import Key
from atoll.stores.sql import tables
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records
from atoll.stores.sql.writes import insert

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Connection, Engine

MAPPER = Mapper(Key, tables.API_KEYS)
_KNOWN = "SELECT 1 FROM api_keys WHERE digest = :digest"
_ALL = "SELECT * FROM api_keys ORDER BY created_at, id"
_REMOVE = "DELETE FROM api_keys WHERE id = :id"


class SqlKeys:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records = Records(engine, MAPPER, "Key")

    async def add(self, key: Key) -> None:
        row = MAPPER.row(key)

        def write(connection: Connection) -> None:
            if connection.execute(_KNOWN, row).fetchone() is None:
                insert(connection, MAPPER.insert, row, "Key")

        try:
            await self._engine.write(write, again=write)
        except AlreadyExists:
            # Another replica inserted the key between the query and the insert, or the id exists.
            await self._engine.write(write, again=write)

    async def all(self) -> list[Key]:
        return await self._records.list(_ALL)

    async def remove(self, key_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": key_id}).rowcount > 0
        )
