"""
Invocations. They are written with their executions, in the transactions of those.

So a write here has no second form: whether a transaction that was cut off was committed is decided
by the execution's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.model.invocation import STATUS_OF, Invocation, InvocationStatus, Mode
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import (
    compare_and_set,
    decode,
    decode_optional,
    encode,
    encode_optional,
    insert,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Operation, Row

_ADD = """
    INSERT INTO invocations (
        id, session_id, execution_id, mode, status, created_at, completed_at, version,
        function_name, metadata
    ) VALUES (
        :id, :session_id, :execution_id, :mode, :status, :created_at, :completed_at, :version,
        :function_name, :metadata
    )
"""
_GET = "SELECT * FROM invocations WHERE id = :id"
_GO_ON = """
    UPDATE invocations SET
        execution_id = :execution_id, status = :status, completed_at = NULL, version = :version + 1
    WHERE id = :id AND version = :version
"""
# One that has ended already is left: its execution may be saved again.
_END = """
    UPDATE invocations SET
        status = :status, completed_at = :completed_at, version = version + 1
    WHERE id = :id AND execution_id = :execution_id AND status IN ('accepted', 'running')
"""


class SqlInvocations:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def get(self, invocation_id: str) -> Invocation | None:
        def read(connection: Connection) -> Invocation | None:
            row = connection.execute(_GET, {"id": invocation_id}).fetchone()
            return None if row is None else _invocation(row)

        return await self._engine.read(read)

    async def page(
        self,
        *,
        session_id: str | None = None,
        status: InvocationStatus | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Invocation]:
        return await self._engine.read(
            page_of(
                "invocations",
                where={"session_id": session_id, "status": status},
                cursor=cursor,
                limit=limit,
                entity=_invocation,
                rows_at_once=self._engine.rows_at_once,
            )
        )


def adding(invocation: Invocation) -> Operation[None]:
    """Stores a new one."""
    row = _row(invocation)
    return lambda connection: insert(connection, _ADD, row, "Invocation")


def going_on(invocation: Invocation, execution: Execution) -> Operation[None]:
    """Makes this execution the latest."""
    row = {
        "id": invocation.id,
        "version": invocation.version,
        "execution_id": execution.id,
        "status": InvocationStatus.ACCEPTED.value,
    }
    return lambda connection: compare_and_set(connection, _GO_ON, row, "Invocation")


def ending(execution: Execution) -> Operation[None] | None:
    """Ends the invocation whose latest execution this is; None when there is nothing to end."""
    if execution.invocation_id is None or not execution.status.ended:
        return None
    row = {
        "id": execution.invocation_id,
        "execution_id": execution.id,
        "status": STATUS_OF[execution.status].value,
        "completed_at": optional_micros(execution.completed_at),
    }

    def end(connection: Connection) -> None:
        connection.execute(_END, row)

    return end


def _row(invocation: Invocation) -> dict[str, Any]:
    return {
        "id": invocation.id,
        "session_id": invocation.session_id,
        "execution_id": invocation.execution_id,
        "mode": invocation.mode.value,
        "status": invocation.status.value,
        "created_at": micros(invocation.created_at),
        "completed_at": optional_micros(invocation.completed_at),
        "version": invocation.version,
        "function_name": encode_optional(invocation.function_name),
        "metadata": encode(invocation.metadata),
    }


def _invocation(row: Row) -> Invocation:
    return Invocation(
        id=row["id"],
        session_id=row["session_id"],
        execution_id=row["execution_id"],
        mode=Mode(row["mode"]),
        status=InvocationStatus(row["status"]),
        created_at=moment(row["created_at"]),
        function_name=decode_optional(row["function_name"]),
        completed_at=optional_moment(row["completed_at"]),
        metadata=decode(row["metadata"]),
        version=row["version"],
    )
