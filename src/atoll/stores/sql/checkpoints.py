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


MAPPER = Mapper(Checkpoint, tables.CHECKPOINTS, rest="backups")
_EXPIRED = """
    SELECT * FROM checkpoints WHERE kept_until <= :now ORDER BY kept_until, id LIMIT :limit
"""


class SqlCheckpoints(Records[Checkpoint]):
    mapper = MAPPER
    noun = "Checkpoint"

    async def expired(self, now: datetime, *, limit: int) -> list[Checkpoint]:
        return await self._list(_EXPIRED, {"now": micros(now), "limit": limit})

    async def remove(self, session_id: str) -> None:
        await self._remove(session_id, repeat=True)
