"""
Keys of the API, by what is stored of their secret.

`add` may be repeated. `remove` may not: a second one would say that nothing was there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import Conflict
from atoll.model.key import Key, Scope
from atoll.stores.sql.rows import decode, encode, insert, micros, moment

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO api_keys (id, digest, scope, created_at, name)
    VALUES (:id, :digest, :scope, :created_at, :name)
"""
_KNOWN = "SELECT 1 FROM api_keys WHERE digest = :digest"
_ALL = "SELECT * FROM api_keys ORDER BY created_at, id"
_REMOVE = "DELETE FROM api_keys WHERE id = :id"


class SqlKeys:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, key: Key) -> None:
        row = {
            "id": key.id,
            "digest": key.digest.hex(),
            "scope": key.scope.value,
            "created_at": micros(key.created_at),
            "name": encode(key.name),
        }

        def write(connection: Connection) -> None:
            if connection.execute(_KNOWN, row).fetchone() is None:
                insert(connection, _ADD, row, "Key")

        try:
            await self._engine.write(write, again=write)
        except Conflict:
            # Another replica came between the look and the insert, unless it is the id that exists.
            await self._engine.write(write, again=write)

    async def all(self) -> list[Key]:
        return await self._engine.read(
            lambda connection: [_key(row) for row in connection.execute(_ALL)]
        )

    async def remove(self, key_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": key_id}).rowcount > 0
        )


def _key(row: Row) -> Key:
    return Key(
        id=row["id"],
        name=decode(row["name"]),
        digest=bytes.fromhex(row["digest"]),
        scope=Scope(row["scope"]),
        created_at=moment(row["created_at"]),
    )
