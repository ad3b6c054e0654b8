"""
Nodes.

Two writers share a row: the node reports on itself, and other nodes judge it. Neither write touches
the columns of the other. `remove` is not repeatable: a second attempt would find nothing and report
that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.model.node import Drain, Node, NodeHealth
from atoll.stores.sql import tables
from atoll.stores.sql.events import add_event
from atoll.stores.sql.json_codec import ObjectCodec, decode, encode
from atoll.stores.sql.mapper import Mapper, Special
from atoll.stores.sql.writes import find_or_insert, insert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection, Engine, Operation, Row

# `problem` is the node's own until a probe finds another, which has a column.
MAPPER = Mapper(Node, tables.NODES, rest="told", special=Special(in_rest={"problem"}))
_REPORT = "UPDATE nodes SET type = :type, seen_at = :seen_at, told = :told WHERE id = :id"
_ALL = "SELECT * FROM nodes ORDER BY id"
_JUDGE = """
    UPDATE nodes SET status = :status, failures = :failures, problem = :problem
    WHERE id = :id AND status = :status_before AND failures = :failures_before
"""
_CORDON = "UPDATE nodes SET cordoned = :cordoned WHERE id = :id"
_DRAIN = "UPDATE nodes SET drain = :drain WHERE id = :id"
_PROGRESS = "UPDATE nodes SET drain = :drain WHERE id = :id AND drain IS NOT NULL"
_REMOVE = "DELETE FROM nodes WHERE id = :id"
_DRAIN_CODEC = ObjectCodec(Drain)


class SqlNodes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def report(self, node: Node, *, event: Event | None = None) -> None:
        row = MAPPER.row(node)

        def write(connection: Connection) -> None:
            if connection.execute(_REPORT, row).rowcount == 0:
                insert(connection, MAPPER.insert, row, "Node")
            add_event(connection, event)

        def again(connection: Connection) -> None:
            found = connection.execute(MAPPER.select, row).fetchone()
            if found is None or any(found[name] != row[name] for name in ("seen_at", "told")):
                write(connection)

        await find_or_insert(self._engine, write, again)

    async def get(self, node_id: str) -> Node | None:
        def read(connection: Connection) -> Node | None:
            row = connection.execute(MAPPER.select, {"id": node_id}).fetchone()
            return None if row is None else _node(row)

        return await self._engine.read(read)

    async def all(self) -> list[Node]:
        return await self._engine.read(
            lambda connection: [_node(row) for row in connection.execute(_ALL)]
        )

    async def record_probe(
        self,
        node: Node,
        *,
        status: NodeHealth,
        failures: int,
        problem: str | None,
        event: Event | None = None,
    ) -> bool:
        row: dict[str, object] = {
            "id": node.id,
            "status": status.value,
            "failures": failures,
            "problem": None if problem is None else encode(problem),
        }
        before = {"status_before": node.status.value, "failures_before": node.failures}

        def write(connection: Connection) -> bool:
            if connection.execute(_JUDGE, {**row, **before}).rowcount == 0:
                return False
            add_event(connection, event)
            return True

        def again(connection: Connection) -> bool:
            found = connection.execute(MAPPER.select, row).fetchone()
            written = found is not None and all(found[name] == row[name] for name in row)
            return written or write(connection)

        return await self._engine.write(write, again=again)

    async def cordon(self, node_id: str, cordoned: bool, *, event: Event | None = None) -> bool:
        row = {"id": node_id, "cordoned": int(cordoned)}
        return await self._engine.write(_changed(_CORDON, row, event))

    async def drain(self, node_id: str, drain: Drain | None, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_DRAIN, _drain_row(node_id, drain), event))

    async def update_drain(self, node_id: str, drain: Drain, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_PROGRESS, _drain_row(node_id, drain), event))

    async def remove(self, node_id: str, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_REMOVE, {"id": node_id}, event))


def _changed(statement: str, row: Mapping[str, object], event: Event | None) -> Operation[bool]:
    def write(connection: Connection) -> bool:
        if connection.execute(statement, row).rowcount == 0:
            return False
        add_event(connection, event)
        return True

    return write


def _drain_row(node_id: str, drain: Drain | None) -> dict[str, object]:
    return {"id": node_id, "drain": None if drain is None else encode(_DRAIN_CODEC.write(drain))}


def _node(row: Row) -> Node:
    node, problem = MAPPER.entity(row), row["problem"]
    return node if problem is None else replace(node, problem=decode(problem))
