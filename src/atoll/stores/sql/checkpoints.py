"""The newest checkpoint of each session, with those before it that are retained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.checkpoint import Checkpoint
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine

MAPPER = Mapper(Checkpoint, tables.CHECKPOINTS, rest="backups")
_EXPIRED = """
    SELECT * FROM checkpoints WHERE kept_until <= :now ORDER BY kept_until, id LIMIT :limit
"""
_REMOVE = "DELETE FROM checkpoints WHERE id = :id"


class SqlCheckpoints:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records = Records(engine, MAPPER, "Checkpoint")

    async def add(self, checkpoint: Checkpoint) -> None:
        await self._records.add(checkpoint)

    async def get(self, session_id: str) -> Checkpoint | None:
        return await self._records.get(session_id)

    async def save(self, checkpoint: Checkpoint) -> Checkpoint:
        return await self._records.save(checkpoint)

    async def expired(self, now: datetime, *, limit: int) -> list[Checkpoint]:
        return await self._records.list(_EXPIRED, {"now": micros(now), "limit": limit})

    async def remove(self, session_id: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_REMOVE, {"id": session_id})

        await self._engine.write(write, again=write)
