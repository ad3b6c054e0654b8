"""
Executions. Every request costs two writes, made of statements that are not built at call time.

An invocation has no row of its own; only its executions are stored. A unique index over invocation
and ordinal connects them: of two executions that race to be the first, or the next, of an
invocation the database refuses one. The alternatives are worse: a second table would cost two more
writes for every request, a query before the insert does not prevent the race on every database, and
ids that are derived from the invocation's decide nothing between two that name ids of their own.

All writes are repeatable: the execution's row shows whether the transaction was committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.execution import Attempt, Execution, ExecutionStatus, Outcome
from atoll.model.fields import fields_of
from atoll.model.page import Page
from atoll.stores.sql import tables
from atoll.stores.sql.events import add_event
from atoll.stores.sql.json_codec import ListCodec, ObjectCodec, decode, encode
from atoll.stores.sql.mapper import Mapper, Special, Values
from atoll.stores.sql.paging import Query, page_of
from atoll.stores.sql.records import Records
from atoll.stores.sql.writes import compare_and_set, insert, was_inserted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection, Engine, Row

_OUTPUT = ("stdout", "stderr", "return_json", "results_json")
"""Fields of an outcome that have columns of their own."""
_OUTCOME = ObjectCodec(Outcome, [name for name in fields_of(Outcome) if name not in _OUTPUT])
_ATTEMPT = ListCodec(Attempt)
_UNFINISHED_COLUMNS = {"outcome": None, **dict.fromkeys(_OUTPUT)}


def _write(execution: Execution) -> Values:
    """An outcome contains the attempts as well: the fewer columns, the cheaper the commit."""
    attempts = [_ATTEMPT.write(attempt) for attempt in execution.attempts]
    outcome = execution.outcome
    if outcome is None:
        return {**_UNFINISHED_COLUMNS, "attempts": encode(attempts) if attempts else None}
    fields = _OUTCOME.write(outcome)
    if attempts:
        fields["attempts"] = attempts
    return {
        "outcome": encode(fields),
        "attempts": None,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        "return_json": outcome.return_json,
        "results_json": outcome.results_json,
    }


def _read(row: Row) -> Values:
    if row["outcome"] is None:
        attempts = () if row["attempts"] is None else decode(row["attempts"])
        return {"attempts": tuple(map(_ATTEMPT.read, attempts)), "outcome": None}
    fields = decode(row["outcome"])
    attempts = tuple(map(_ATTEMPT.read, fields.pop("attempts", ())))
    output = {name: row[name] for name in _OUTPUT}
    return {"attempts": attempts, "outcome": Outcome(**_OUTCOME.fields(fields), **output)}


MAPPER = Mapper(
    Execution,
    tables.EXECUTIONS,
    special=Special(
        columns={"attempts", "outcome", *_OUTPUT},
        write=_write,
        fields={"attempts", "outcome"},
        read=_read,
    ),
)
_FIXED = {
    "session_id", "created_at", "request", "invocation_id", "ordinal", "superseded", "invoked_at",
}  # fmt: skip
"""Columns that never change, or by `add_after` alone."""
_CHANGING = [name for name in MAPPER.columns if name not in _FIXED]
_SAVE = MAPPER.update(_CHANGING)
changing_row = MAPPER.part(_CHANGING)
"""The columns that change, and those that identify the row."""
_SUPERSEDE = """
    UPDATE executions SET superseded = 1, version = :version + 1
    WHERE id = :id AND version = :version
"""
_UNFINISHED = """
    SELECT * FROM executions
    WHERE status IN ('pending', 'running') AND id > :after ORDER BY id LIMIT :limit
"""
_HELD = """
    SELECT * FROM executions
    WHERE status IN ('pending', 'running') AND holder = :holder AND id > :after
    ORDER BY id LIMIT :limit
"""
_HOLDERS = "SELECT DISTINCT holder FROM executions WHERE status IN ('pending', 'running')"


class SqlExecutions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records = Records(engine, MAPPER, "Execution")

    async def add(self, execution: Execution, *, event: Event | None = None) -> None:
        await self._records.add(execution, event=event)

    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        row, before = MAPPER.row(execution), {"id": previous.id, "version": previous.version}

        def write(connection: Connection) -> None:
            # This statement comes first, so that concurrent writers wait for each other here and
            # cannot deadlock.
            compare_and_set(connection, _SUPERSEDE, before, "Execution")
            insert(connection, MAPPER.insert, row, "Execution")
            add_event(connection, event)

        def again(connection: Connection) -> None:
            if not was_inserted(connection, MAPPER.select, row, "Execution"):
                write(connection)

        await self._engine.write(write, again=again)

    async def get(self, execution_id: str) -> Execution | None:
        return await self._records.get(execution_id)

    async def save(self, execution: Execution, *, event: Event | None = None) -> Execution:
        return await self._records.update(_SAVE, execution, changing_row(execution), event)

    async def page(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        where = {"invocation_id": invocation_id, "session_id": session_id, "status": status}
        return await self._records.page(cursor=cursor, limit=limit, where=where)

    async def latest(
        self,
        *,
        session_id: str | None = None,
        statuses: Sequence[ExecutionStatus] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        query = Query("executions", {"session_id": session_id}, self._engine.rows_at_once, statuses)
        page = await self._engine.read(page_of(query, _latest, cursor, limit))
        return Page(tuple(item for item in page.items if item is not None), page.next_cursor)

    async def unfinished(
        self, *, limit: int, after: str = "", holder: str | None = None
    ) -> list[Execution]:
        values = {"after": after, "limit": limit}
        if holder is None:
            return await self._records.list(_UNFINISHED, values)
        return await self._records.list(_HELD, {**values, "holder": holder})

    async def holders(self) -> set[str | None]:
        return await self._engine.read(
            lambda connection: {row["holder"] for row in connection.execute(_HOLDERS)}
        )


def _latest(row: Row) -> Execution | None:
    """None if it is not the latest of an invocation."""
    if row["superseded"] or row["invocation_id"] is None:
        return None
    return MAPPER.entity(row)
