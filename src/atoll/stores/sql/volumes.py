"""
Volumes.

`add` may be repeated. `remove` may not: a second one would say that nothing was there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.model.volume import Volume
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import insert, insert_again, micros, moment

if TYPE_CHECKING:
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO volumes (id, created_at, size, kind, node_id, version)
    VALUES (:id, :created_at, :size, :kind, :node_id, :version)
"""
_GET = "SELECT * FROM volumes WHERE id = :id"
_REMOVE = "DELETE FROM volumes WHERE id = :id"


class SqlVolumes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, volume: Volume) -> None:
        row = _row(volume)
        await self._engine.write(
            lambda connection: insert(connection, _ADD, row, "Volume"),
            again=lambda connection: insert_again(connection, _ADD, _GET, row, "Volume"),
        )

    async def get(self, volume_id: str) -> Volume | None:
        def read(connection: Connection) -> Volume | None:
            row = connection.execute(_GET, {"id": volume_id}).fetchone()
            return None if row is None else _volume(row)

        return await self._engine.read(read)

    async def remove(self, volume_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": volume_id}).rowcount > 0
        )

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Volume]:
        return await self._engine.read(
            page_of(
                "volumes",
                where={},
                cursor=cursor,
                limit=limit,
                entity=_volume,
                rows_at_once=self._engine.rows_at_once,
            )
        )


def _row(volume: Volume) -> dict[str, Any]:
    return {
        "id": volume.id,
        "created_at": micros(volume.created_at),
        "size": volume.size,
        "kind": volume.kind,
        "node_id": volume.node_id,
        "version": volume.version,
    }


def _volume(row: Row) -> Volume:
    return Volume(
        id=row["id"],
        created_at=moment(row["created_at"]),
        size=row["size"],
        kind=row["kind"],
        node_id=row["node_id"],
        version=row["version"],
    )
