"""
Requests with an idempotency key, and their answers.

`answer` is repeatable. The other writes are not: a second attempt cannot tell what the first one
did from what another request of the same holder did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import AlreadyExists
from atoll.model.idempotency_record import IdempotencyRecord
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.mapper import Mapper, Special, Values
from atoll.stores.sql.writes import insert

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine, Row

MAPPER = Mapper(
    IdempotencyRecord, tables.KEYED_REQUESTS, special=Special(never_null={"headers", "body"})
)
_DROP_EXPIRED = "DELETE FROM keyed_requests WHERE id = :id AND expires_at <= :created_at"
_TAKE_OVER = """
    UPDATE keyed_requests SET holder = :new_holder, fingerprint = :fingerprint
    WHERE id = :id AND holder = :holder AND status IS NULL
"""
_ANSWERED = ("fingerprint", "status", "kept", "headers", "body")
_ANSWER = f"""
    UPDATE keyed_requests SET {", ".join(f"{name} = :{name}" for name in _ANSWERED)}
    WHERE id = :id AND holder = :holder AND status IS NULL
"""  # noqa: S608 the names are constants
_FORGET = "DELETE FROM keyed_requests WHERE id = :id AND holder = :holder AND status IS NULL"
_EXPIRED = """
    SELECT id, holder, created_at, expires_at, fingerprint, status, kept,
        NULL AS headers, NULL AS body
    FROM keyed_requests WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit
"""
_REMOVE = "DELETE FROM keyed_requests WHERE id = :id AND expires_at <= :now"


class SqlIdempotencyRecords:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def claim(self, record: IdempotencyRecord) -> IdempotencyRecord | None:
        row = MAPPER.row(record)

        def write(connection: Connection) -> IdempotencyRecord | None:
            connection.execute(_DROP_EXPIRED, row)
            found = connection.execute(MAPPER.select, row).fetchone()
            if found is not None:
                return MAPPER.entity(found)
            insert(connection, MAPPER.insert, row, "Idempotency record")
            return None

        while True:
            try:
                return await self._engine.write(write)
            except AlreadyExists:
                continue  # Another replica inserted it between the query and the insert.

    async def take_over(self, record: IdempotencyRecord, holder: str) -> bool:
        values = {
            "id": record.id,
            "holder": record.holder,
            "new_holder": holder,
            "fingerprint": record.fingerprint,
        }
        return await self._engine.write(
            lambda connection: connection.execute(_TAKE_OVER, values).rowcount > 0
        )

    async def answer(self, record: IdempotencyRecord) -> bool:
        row = MAPPER.row(record)

        def write(connection: Connection) -> bool:
            return connection.execute(_ANSWER, row).rowcount > 0

        def again(connection: Connection) -> bool:
            if write(connection):
                return True
            return _has_this_answer(connection.execute(MAPPER.select, row).fetchone(), row)

        return await self._engine.write(write, again=again)

    async def forget(self, record_id: str, holder: str) -> None:
        values = {"id": record_id, "holder": holder}
        await self._engine.write(lambda connection: connection.execute(_FORGET, values).rowcount)

    async def expire(self, now: datetime, *, limit: int) -> list[IdempotencyRecord]:
        values = {"now": micros(now), "limit": limit}

        def write(connection: Connection) -> list[IdempotencyRecord]:
            return [
                MAPPER.entity(row)
                for row in connection.execute(_EXPIRED, values).fetchall()
                if connection.execute(_REMOVE, {"id": row["id"], "now": values["now"]}).rowcount
            ]

        return await self._engine.write(write)


def _has_this_answer(found: Row | None, row: Values) -> bool:
    return found is not None and all(found[name] == row[name] for name in ("holder", *_ANSWERED))
