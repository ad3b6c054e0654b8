"""Volumes. `remove` is not repeatable: a second attempt would find nothing and report that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.volume import Volume
from atoll.stores.sql import tables
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records

if TYPE_CHECKING:
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Engine

MAPPER = Mapper(Volume, tables.VOLUMES)
_REMOVE = "DELETE FROM volumes WHERE id = :id"


class SqlVolumes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records = Records(engine, MAPPER, "Volume")

    async def add(self, volume: Volume) -> None:
        await self._records.add(volume)

    async def get(self, volume_id: str) -> Volume | None:
        return await self._records.get(volume_id)

    async def remove(self, volume_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": volume_id}).rowcount > 0
        )

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Volume]:
        return await self._records.page(cursor=cursor, limit=limit)
