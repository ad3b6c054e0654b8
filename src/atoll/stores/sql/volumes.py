"""Volumes. `remove` is not repeatable: a second attempt would find nothing and report that."""

from __future__ import annotations

from atoll.model.volume import Volume
from atoll.stores.sql import tables
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records

MAPPER = Mapper(Volume, tables.VOLUMES)


class SqlVolumes(Records[Volume]):
    mapper = MAPPER
    noun = "Volume"

    async def remove(self, volume_id: str) -> bool:
        return await self._remove(volume_id)
