"""
Executions. Two writes for every request, of statements that are not built at call time.

An invocation is its executions, and only they are written. What holds them together is a unique
index over invocation and ordinal: of two that race to be the first, or the next, of an invocation
the database refuses one, whatever either has read. A second table would cost two more writes for
every request, a check before the insert does not hold on all databases, and ids that are derived
from the invocation's settle nothing between two that name ids of their own.

All writes may be repeated: the execution's row tells whether the transaction was committed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from atoll.model.execution import (
    Artifact,
    Attempt,
    Execution,
    ExecutionStatus,
    Language,
    Mode,
    Outcome,
    Request,
)
from atoll.model.page import Page
from atoll.model.session import Cause
from atoll.stores.sql.events import tell
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    decode,
    encode,
    insert,
    inserted,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO executions (
        id, session_id, status, created_at, instance_id, started_at, completed_at, retry_count,
        version, request, outcome, return_json, stdout, stderr, holder, kept, invocation_id,
        ordinal, superseded, invoked_at, attempts, results_json
    ) VALUES (
        :id, :session_id, :status, :created_at, :instance_id, :started_at, :completed_at,
        :retry_count, :version, :request, :outcome, :return_json, :stdout, :stderr, :holder, :kept,
        :invocation_id, :ordinal, :superseded, :invoked_at, :attempts, :results_json
    )
"""
_GET = "SELECT * FROM executions WHERE id = :id"
_SAVE = """
    UPDATE executions SET
        status = :status, instance_id = :instance_id, started_at = :started_at,
        completed_at = :completed_at, retry_count = :retry_count, outcome = :outcome,
        return_json = :return_json, stdout = :stdout, stderr = :stderr, holder = :holder,
        kept = :kept, attempts = :attempts, results_json = :results_json, version = :version + 1
    WHERE id = :id AND version = :version
"""
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
_KINDS: dict[str, Callable[[Any], Any]] = {
    "language": Language,
    "command": tuple,
    "args": tuple,
    "terminal": tuple,
    "mode": Mode,
}
"""Of the fields of a request that JSON has no kind for."""
_BYTES = ("stdout", "stderr", "return_json", "results_json")
_REQUEST = {field.name: getattr(Request(), field.name) for field in fields(Request)}
_OUTCOME: dict[str, Any] = {
    field.name: getattr(Outcome(ExecutionStatus.COMPLETED, None, 0), field.name)
    for field in fields(Outcome)
    if field.name not in (*_BYTES, "artifacts")
} | {"status": None, "cause": "", "exit_code": ""}
"""What is usual of each field; the last are always told."""
_HOLDERS = "SELECT DISTINCT holder FROM executions WHERE status IN ('pending', 'running')"


class SqlExecutions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, execution: Execution, *, event: Event | None = None) -> None:
        row = row_of(execution)

        def write(connection: Connection) -> None:
            insert(connection, _ADD, row, "Execution")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if not inserted(connection, _GET, row, "Execution"):
                write(connection)

        await self._engine.write(write, again=again)

    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        row, before = row_of(execution), {"id": previous.id, "version": previous.version}

        def write(connection: Connection) -> None:
            # First, so that those who race wait here for each other and cannot block crosswise.
            compare_and_set(connection, _SUPERSEDE, before, "Execution")
            insert(connection, _ADD, row, "Execution")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if not inserted(connection, _GET, row, "Execution"):
                write(connection)

        await self._engine.write(write, again=again)

    async def get(self, execution_id: str) -> Execution | None:
        def read(connection: Connection) -> Execution | None:
            row = connection.execute(_GET, {"id": execution_id}).fetchone()
            return None if row is None else _execution(row)

        return await self._engine.read(read)

    async def save(self, execution: Execution, *, event: Event | None = None) -> Execution:
        row = _progress(execution)

        def write(connection: Connection) -> None:
            compare_and_set(connection, _SAVE, row, "Execution")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if compare_and_set_again(connection, _SAVE, _GET, row, "Execution"):
                tell(connection, event)

        await self._engine.write(write, again=again)
        return replace(execution, version=execution.version + 1)

    async def page(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        return await self._engine.read(
            page_of(
                "executions",
                where={
                    "invocation_id": invocation_id,
                    "session_id": session_id,
                    "status": status,
                },
                cursor=cursor,
                limit=limit,
                entity=_execution,
                rows_at_once=self._engine.rows_at_once,
            )
        )

    async def latest(
        self,
        *,
        session_id: str | None = None,
        statuses: Sequence[ExecutionStatus] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        page = await self._engine.read(
            page_of(
                "executions",
                where={"session_id": session_id},
                statuses=statuses,
                cursor=cursor,
                limit=limit,
                entity=_latest,
                rows_at_once=self._engine.rows_at_once,
            )
        )
        return Page(tuple(item for item in page.items if item is not None), page.next_cursor)

    async def unfinished(
        self, *, limit: int, after: str = "", holder: str | None = None
    ) -> list[Execution]:
        values = {"after": after, "limit": limit}
        statement = _UNFINISHED
        if holder is not None:
            statement, values["holder"] = _HELD, holder

        def read(connection: Connection) -> list[Execution]:
            return [_execution(row) for row in connection.execute(statement, values)]

        return await self._engine.read(read)

    async def holders(self) -> set[str | None]:
        return await self._engine.read(
            lambda connection: {row["holder"] for row in connection.execute(_HOLDERS)}
        )


def row_of(execution: Execution) -> dict[str, Any]:
    return {
        **_progress(execution),
        "session_id": execution.session_id,
        "created_at": micros(execution.created_at),
        "request": encode(_told(execution.request, _REQUEST)),
        "invocation_id": execution.invocation_id,
        "ordinal": execution.ordinal,
        "superseded": int(execution.superseded),
        "invoked_at": optional_micros(execution.invoked_at),
    }


def _progress(execution: Execution) -> dict[str, Any]:
    """The columns that change, and those that name the row."""
    outcome = execution.outcome
    return {
        "id": execution.id,
        "version": execution.version,
        "status": execution.status.value,
        "instance_id": execution.instance_id,
        "started_at": optional_micros(execution.started_at),
        "completed_at": optional_micros(execution.completed_at),
        "retry_count": execution.retry_count,
        "outcome": None if outcome is None else _encode_outcome(outcome, execution.attempts),
        "return_json": None if outcome is None else outcome.return_json,
        "stdout": None if outcome is None else outcome.stdout,
        "stderr": None if outcome is None else outcome.stderr,
        "holder": execution.holder,
        "kept": encode(execution.kept) if execution.kept else None,
        "attempts": encode(_attempts_out(execution.attempts))
        if outcome is None and execution.attempts
        else None,
        "results_json": None if outcome is None else outcome.results_json,
    }


def _told(value: Request | Outcome, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not as usual: the shorter a row, the fewer pages a commit writes."""
    return {
        name: given for name, default in usual.items() if (given := getattr(value, name)) != default
    }


def _attempts_out(attempts: tuple[Attempt, ...]) -> list[tuple[Any, ...]]:
    return [
        (
            micros(attempt.started_at),
            micros(attempt.ended_at),
            attempt.node_id,
            attempt.instance_id,
            attempt.cause,
            attempt.message,
        )
        for attempt in attempts
    ]


def _encode_outcome(outcome: Outcome, attempts: tuple[Attempt, ...]) -> str:
    """All but the bytes, which have columns; with the attempts, which are encoded once so."""
    fields = _told(outcome, _OUTCOME)
    if outcome.artifacts:
        fields["artifacts"] = [
            {
                "path": artifact.path,
                "size": artifact.size,
                "mime_type": artifact.mime_type,
                "created_at": micros(artifact.created_at),
                "checksum": artifact.checksum,
                "type": artifact.type,
            }
            for artifact in outcome.artifacts
        ]
    if attempts:
        fields["attempts"] = _attempts_out(attempts)
    return encode(fields)


def _latest(row: Row) -> Execution | None:
    """None when it is not the latest of an invocation."""
    if row["superseded"] or row["invocation_id"] is None:
        return None
    return _execution(row)


def _execution(row: Row) -> Execution:
    outcome = None
    attempts = () if row["attempts"] is None else _attempts(decode(row["attempts"]))
    if row["outcome"] is not None:
        fields = decode(row["outcome"])
        attempts = _attempts(fields.pop("attempts", ()))
        outcome = _outcome(row, fields)
    return Execution(
        id=row["id"],
        session_id=row["session_id"],
        request=_decode_request(row["request"]),
        status=ExecutionStatus(row["status"]),
        created_at=moment(row["created_at"]),
        instance_id=row["instance_id"],
        started_at=optional_moment(row["started_at"]),
        completed_at=optional_moment(row["completed_at"]),
        retry_count=row["retry_count"],
        invocation_id=row["invocation_id"],
        ordinal=row["ordinal"],
        superseded=bool(row["superseded"]),
        invoked_at=optional_moment(row["invoked_at"]),
        attempts=attempts,
        outcome=outcome,
        holder=row["holder"],
        kept={} if row["kept"] is None else decode(row["kept"]),
        version=row["version"],
    )


def _decode_request(text: str) -> Request:
    fields = decode(text)
    for name, kind in _KINDS.items():
        if fields.get(name) is not None:
            fields[name] = kind(fields[name])
    return Request(**fields)


def _attempts(several: Sequence[Sequence[Any]]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            started_at=moment(started_at),
            ended_at=moment(ended_at),
            node_id=node_id,
            instance_id=instance_id,
            cause=None if cause is None else Cause(cause),
            message=message,
        )
        for started_at, ended_at, node_id, instance_id, cause, message in several
    )


def _outcome(row: Row, fields: dict[str, Any]) -> Outcome:
    fields["status"] = ExecutionStatus(fields["status"])
    if fields["cause"] is not None:
        fields["cause"] = Cause(fields["cause"])
    fields["artifacts"] = tuple(
        Artifact(**(artifact | {"created_at": moment(artifact["created_at"])}))
        for artifact in fields.get("artifacts", ())
    )
    if "log" in fields:
        fields["log"] = tuple(map(tuple, fields["log"]))
    return Outcome(
        stdout=row["stdout"],
        stderr=row["stderr"],
        return_json=row["return_json"],
        results_json=row["results_json"],
        **fields,
    )
