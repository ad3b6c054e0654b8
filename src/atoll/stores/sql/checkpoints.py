"""The newest checkpoint of each session."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.model.checkpoint import Checkpoint, Older
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    insert,
    insert_again,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO checkpoints (
        id, number, manifest, created_at, files, size, node_id, kept_until, version, backups
    ) VALUES (
        :id, :number, :manifest, :created_at, :files, :size, :node_id, :kept_until, :version,
        :backups
    )
"""
_GET = "SELECT * FROM checkpoints WHERE id = :id"
_SAVE = """
    UPDATE checkpoints SET
        number = :number, manifest = :manifest, created_at = :created_at, files = :files,
        size = :size, node_id = :node_id, kept_until = :kept_until, backups = :backups,
        version = :version + 1
    WHERE id = :id AND version = :version
"""
_EXPIRED = """
    SELECT * FROM checkpoints WHERE kept_until <= :now ORDER BY kept_until, id LIMIT :limit
"""
_REMOVE = "DELETE FROM checkpoints WHERE id = :id"


class SqlCheckpoints:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, checkpoint: Checkpoint) -> None:
        row = _row(checkpoint)
        await self._engine.write(
            lambda connection: insert(connection, _ADD, row, "Checkpoint"),
            again=lambda connection: insert_again(connection, _ADD, _GET, row, "Checkpoint"),
        )

    async def get(self, session_id: str) -> Checkpoint | None:
        def read(connection: Connection) -> Checkpoint | None:
            row = connection.execute(_GET, {"id": session_id}).fetchone()
            return None if row is None else _checkpoint(row)

        return await self._engine.read(read)

    async def save(self, checkpoint: Checkpoint) -> Checkpoint:
        row = _row(checkpoint)
        await self._engine.write(
            lambda connection: compare_and_set(connection, _SAVE, row, "Checkpoint"),
            again=lambda connection: compare_and_set_again(
                connection, _SAVE, _GET, row, "Checkpoint"
            ),
        )
        return replace(checkpoint, version=checkpoint.version + 1)

    async def expired(self, now: datetime, *, limit: int) -> list[Checkpoint]:
        values = {"now": micros(now), "limit": limit}
        return await self._engine.read(
            lambda connection: [_checkpoint(row) for row in connection.execute(_EXPIRED, values)]
        )

    async def remove(self, session_id: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_REMOVE, {"id": session_id})

        await self._engine.write(write, again=write)


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.id,
        "number": checkpoint.number,
        "manifest": checkpoint.manifest,
        "created_at": micros(checkpoint.created_at),
        "files": checkpoint.files,
        "size": checkpoint.size,
        "node_id": checkpoint.node_id,
        "kept_until": optional_micros(checkpoint.kept_until),
        "version": checkpoint.version,
        "backups": _encoded(checkpoint),
    }


def _encoded(checkpoint: Checkpoint) -> str:
    older = [
        {**dataclasses.asdict(one), "created_at": micros(one.created_at)}
        for one in checkpoint.older
    ]
    fields = {"settled": checkpoint.settled, "damaged": checkpoint.damaged, "older": older}
    return json.dumps(fields, separators=(",", ":"))


def _older(fields: dict[str, Any]) -> Older:
    return Older(**{**fields, "created_at": moment(fields["created_at"])})


def _checkpoint(row: Row) -> Checkpoint:
    # One of before there was such a column has none.
    backups = json.loads(row["backups"] or "{}")
    return Checkpoint(
        id=row["id"],
        number=row["number"],
        manifest=row["manifest"],
        created_at=moment(row["created_at"]),
        files=row["files"],
        size=row["size"],
        node_id=row["node_id"],
        kept_until=optional_moment(row["kept_until"]),
        version=row["version"],
        settled=backups.get("settled", True),
        older=tuple(_older(fields) for fields in backups.get("older", ())),
        damaged=backups.get("damaged", False),
    )
