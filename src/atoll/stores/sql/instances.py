"""
Instances. Saving a session writes its instance's `session_id`; see `sessions`.

`claim` is not repeatable: a second attempt cannot tell whether the first one or another task of the
same holder claimed the instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.instance import Instance
from atoll.stores.sql import tables
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.records import Records

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Connection

MAPPER = Mapper(Instance, tables.INSTANCES)
_ALL = "SELECT * FROM instances ORDER BY id"
_WAITING = """
    SELECT template_id, COUNT(*) AS many FROM instances
    WHERE node_id = :node_id AND session_id IS NULL AND holder <> :except_holder
    GROUP BY template_id
"""
_CLAIM = """
    UPDATE instances SET holder = :holder
    WHERE id = :id AND session_id IS NULL
        AND (holder = :previous_holder OR holder IS NULL AND :nobody = 1)
"""
_ABANDON = "DELETE FROM instances WHERE id = :id AND session_id IS NULL"


class SqlInstances(Records[Instance]):
    mapper = MAPPER
    noun = "Instance"

    async def all(self) -> list[Instance]:
        return await self._list(_ALL)

    async def count_unclaimed(self, node_id: str, *, except_holder: str) -> dict[str, int]:
        values = {"node_id": node_id, "except_holder": except_holder}
        return await self._engine.read(
            lambda connection: {
                row["template_id"]: int(row["many"]) for row in connection.execute(_WAITING, values)
            }
        )

    async def claim(self, instance_id: str, *, holder: str, previous_holder: str | None) -> bool:
        values = {
            "id": instance_id,
            "holder": holder,
            "previous_holder": previous_holder or "",
            "nobody": int(previous_holder is None),
        }
        return await self._engine.write(
            lambda connection: connection.execute(_CLAIM, values).rowcount > 0
        )

    async def remove_unclaimed(self, instance_id: str) -> bool:
        def write(connection: Connection) -> bool:
            connection.execute(_ABANDON, {"id": instance_id})
            return connection.execute(MAPPER.select, {"id": instance_id}).fetchone() is None

        return await self._engine.write(write, again=write)

    async def remove(self, instance_id: str) -> None:
        await self._remove(instance_id, repeat=True)
