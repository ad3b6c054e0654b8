"""
Instances. Their owner is written with the session that takes them; see `sessions`.

`add` and `remove` may be repeated. `claim` may not: a second one cannot tell its own first from
another task's of the same holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.model.instance import Handle, Instance
from atoll.stores.sql.rows import decode, encode, insert, insert_again, micros, moment

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO instances (
        id, node_id, template_id, template_version, created_at, session_id, workspace, handle,
        holder
    ) VALUES (
        :id, :node_id, :template_id, :template_version, :created_at, :session_id, :workspace,
        :handle, :holder
    )
"""
_GET = "SELECT * FROM instances WHERE id = :id"
_ALL = "SELECT * FROM instances ORDER BY id"
_WAITING = """
    SELECT template_id, COUNT(*) AS many FROM instances
    WHERE node_id = :node_id AND session_id IS NULL AND holder <> :besides
    GROUP BY template_id
"""
_CLAIM = """
    UPDATE instances SET holder = :holder
    WHERE id = :id AND session_id IS NULL
        AND (holder = :instead_of OR holder IS NULL AND :nobody = 1)
"""
_ABANDON = "DELETE FROM instances WHERE id = :id AND session_id IS NULL"
_REMOVE = "DELETE FROM instances WHERE id = :id"


class SqlInstances:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, instance: Instance) -> None:
        row = _row(instance)
        await self._engine.write(
            lambda connection: insert(connection, _ADD, row, "Instance"),
            again=lambda connection: insert_again(connection, _ADD, _GET, row, "Instance"),
        )

    async def get(self, instance_id: str) -> Instance | None:
        def read(connection: Connection) -> Instance | None:
            row = connection.execute(_GET, {"id": instance_id}).fetchone()
            return None if row is None else _instance(row)

        return await self._engine.read(read)

    async def all(self) -> list[Instance]:
        return await self._engine.read(
            lambda connection: [_instance(row) for row in connection.execute(_ALL)]
        )

    async def waiting(self, node_id: str, *, besides: str) -> dict[str, int]:
        values = {"node_id": node_id, "besides": besides}
        return await self._engine.read(
            lambda connection: {
                row["template_id"]: int(row["many"]) for row in connection.execute(_WAITING, values)
            }
        )

    async def claim(self, instance_id: str, *, holder: str, instead_of: str | None) -> bool:
        values = {
            "id": instance_id,
            "holder": holder,
            "instead_of": instead_of or "",
            "nobody": int(instead_of is None),
        }
        return await self._engine.write(
            lambda connection: connection.execute(_CLAIM, values).rowcount > 0
        )

    async def abandon(self, instance_id: str) -> bool:
        def write(connection: Connection) -> bool:
            connection.execute(_ABANDON, {"id": instance_id})
            return connection.execute(_GET, {"id": instance_id}).fetchone() is None

        return await self._engine.write(write, again=write)

    async def remove(self, instance_id: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_REMOVE, {"id": instance_id})

        await self._engine.write(write, again=write)


def _row(instance: Instance) -> dict[str, Any]:
    handle = instance.handle
    return {
        "id": instance.id,
        "node_id": instance.node_id,
        "template_id": instance.template_id,
        "template_version": instance.template_version,
        "created_at": micros(instance.created_at),
        "session_id": instance.session_id,
        "holder": instance.holder,
        "workspace": encode(instance.workspace),
        "handle": encode(
            {
                "instance_id": handle.instance_id,
                "driver": handle.driver,
                "version": handle.version,
                "data": handle.data,
            }
        ),
    }


def _instance(row: Row) -> Instance:
    return Instance(
        id=row["id"],
        node_id=row["node_id"],
        template_id=row["template_id"],
        template_version=row["template_version"],
        workspace=decode(row["workspace"]),
        handle=Handle(**decode(row["handle"])),
        created_at=moment(row["created_at"]),
        session_id=row["session_id"],
        holder=row["holder"],
    )
