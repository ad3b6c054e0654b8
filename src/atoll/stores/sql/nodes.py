"""
Nodes.

Two hands write a row: the node tells of itself, others judge it. Neither write touches what belongs
to the other. `remove` may not be repeated: a second one would say that nothing was there.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.model.node import Drain, Node, NodeMetrics, NodeStatus
from atoll.stores.sql.events import tell
from atoll.stores.sql.rows import (
    decode,
    decode_optional,
    encode,
    encode_optional,
    insert,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection, Engine, Operation, Row

_ADD = """
    INSERT INTO nodes (id, type, seen_at, told, status, failures, problem, cordoned, drain)
    VALUES (:id, :type, :seen_at, :told, :status, :failures, NULL, :cordoned, :drain)
"""
_TELL = "UPDATE nodes SET type = :type, seen_at = :seen_at, told = :told WHERE id = :id"
_GET = "SELECT * FROM nodes WHERE id = :id"
_ALL = "SELECT * FROM nodes ORDER BY id"
_JUDGE = """
    UPDATE nodes SET status = :status, failures = :failures, problem = :problem
    WHERE id = :id AND status = :status_before AND failures = :failures_before
"""
_CORDON = "UPDATE nodes SET cordoned = :cordoned WHERE id = :id"
_DRAIN = "UPDATE nodes SET drain = :drain WHERE id = :id"
_PROGRESS = "UPDATE nodes SET drain = :drain WHERE id = :id AND drain IS NOT NULL"
_REMOVE = "DELETE FROM nodes WHERE id = :id"


class SqlNodes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def tell(self, node: Node, *, event: Event | None = None) -> None:
        row = _row(node)

        def write(connection: Connection) -> None:
            if connection.execute(_TELL, row).rowcount == 0:
                insert(connection, _ADD, row, "Node")
            tell(connection, event)

        def again(connection: Connection) -> None:
            found = connection.execute(_GET, row).fetchone()
            if found is None or any(found[name] != row[name] for name in ("seen_at", "told")):
                write(connection)

        try:
            await self._engine.write(write, again=again)
        except Conflict:
            # Another process of the node came between the look and the insert.
            await self._engine.write(write, again=again)

    async def get(self, node_id: str) -> Node | None:
        def read(connection: Connection) -> Node | None:
            row = connection.execute(_GET, {"id": node_id}).fetchone()
            return None if row is None else _node(row)

        return await self._engine.read(read)

    async def all(self) -> list[Node]:
        return await self._engine.read(
            lambda connection: [_node(row) for row in connection.execute(_ALL)]
        )

    async def judge(
        self,
        node: Node,
        *,
        status: NodeStatus,
        failures: int,
        problem: str | None,
        event: Event | None = None,
    ) -> bool:
        row: dict[str, object] = {
            "id": node.id,
            "status": status.value,
            "failures": failures,
            "problem": encode_optional(problem),
        }
        before = {"status_before": node.status.value, "failures_before": node.failures}

        def write(connection: Connection) -> bool:
            if connection.execute(_JUDGE, {**row, **before}).rowcount == 0:
                return False
            tell(connection, event)
            return True

        def again(connection: Connection) -> bool:
            found = connection.execute(_GET, row).fetchone()
            written = found is not None and all(found[name] == row[name] for name in row)
            return written or write(connection)

        return await self._engine.write(write, again=again)

    async def cordon(self, node_id: str, cordoned: bool, *, event: Event | None = None) -> bool:
        row = {"id": node_id, "cordoned": int(cordoned)}
        return await self._engine.write(_changed(_CORDON, row, event))

    async def drain(self, node_id: str, drain: Drain | None, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_DRAIN, _drain_row(node_id, drain), event))

    async def progress(self, node_id: str, drain: Drain, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_PROGRESS, _drain_row(node_id, drain), event))

    async def remove(self, node_id: str, *, event: Event | None = None) -> bool:
        return await self._engine.write(_changed(_REMOVE, {"id": node_id}, event))


def _changed(statement: str, row: Mapping[str, object], event: Event | None) -> Operation[bool]:
    def write(connection: Connection) -> bool:
        if connection.execute(statement, row).rowcount == 0:
            return False
        tell(connection, event)
        return True

    return write


def _drain_row(node_id: str, drain: Drain | None) -> dict[str, object]:
    return {"id": node_id, "drain": None if drain is None else encode(asdict(drain))}


def _row(node: Node) -> dict[str, Any]:
    told = {
        "url": node.url,
        "labels": node.labels,
        "provides": sorted(node.provides),
        "missing": node.missing,
        "max_sessions": node.max_sessions,
        "metrics": None if node.metrics is None else asdict(node.metrics),
        "sessions": node.sessions,
        "templates": node.templates,
        "building": node.building,
        "pool": node.pool,
        "shared_blobs": node.shared_blobs,
        "problem": node.problem,
    }
    return {
        "id": node.id,
        "type": node.type,
        "seen_at": optional_micros(node.seen_at),
        "told": encode(told),
        "status": node.status.value,
        "failures": node.failures,
        "cordoned": int(node.cordoned),
        "drain": None if node.drain is None else encode(asdict(node.drain)),
    }


def _node(row: Row) -> Node:
    told, drain, found = decode(row["told"]), decode_optional(row["drain"]), row["problem"]
    return Node(
        id=row["id"],
        type=row["type"],
        url=told["url"],
        labels=told["labels"],
        provides=frozenset(told["provides"]),
        missing=told["missing"],
        max_sessions=told["max_sessions"],
        metrics=None if told["metrics"] is None else NodeMetrics(**told["metrics"]),
        sessions=told["sessions"],
        templates=tuple(told["templates"]),
        building=tuple(told["building"]),
        pool=told["pool"],
        shared_blobs=told["shared_blobs"],
        seen_at=optional_moment(row["seen_at"]),
        problem=told["problem"] if found is None else decode(found),
        status=NodeStatus(row["status"]),
        failures=row["failures"],
        cordoned=bool(row["cordoned"]),
        drain=None if drain is None else Drain(**drain),
    )
