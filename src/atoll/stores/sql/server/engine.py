"""
MariaDB and PostgreSQL: operations on pooled connections, with retries.

Each attempt at an operation has its own connection, transaction and time limit. After a broken
connection or a deadlock, reads are retried, and writes that pass `again`, because it is not known
whether the interrupted transaction was committed. Other writes fail, and their callers decide what
to do. While the database is known to be down, one call at a time makes one attempt, and the calls
that arrive meanwhile fail with it instead of queueing up behind its retries.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy as sa

from atoll.errors import Conflict, DatabaseUnavailable, PermanentError
from atoll.stores.sql.dsn import addresses
from atoll.stores.sql.engine import UniqueViolation
from atoll.stores.sql.revisions import HEAD, SchemaState, revision_of, schema_state
from atoll.stores.sql.server.connect import abort, make_engine
from atoll.stores.sql.server.errors import (
    UNIQUE_VIOLATIONS,
    ConnectionFailed,
    OutcomeUnknown,
    RolledBack,
    ServerRefused,
    error_code,
    is_usable,
    translate,
)
from atoll.stores.sql.server.one_message import send
from atoll.stores.sql.writes import Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from atoll.settings import DatabaseSettings
    from atoll.stores.sql.engine import Operation, Row, T

# Seconds. After a deadlock the server is still there, so the loser retries almost at once.
DEADLOCK_PAUSE = 0.02


class ServerEngine:
    """Runs operations through a pool; used by the event loop that opened it."""

    # The drivers fetch whole results.
    rows_at_once: int | None = 16

    def __init__(self, urls: Sequence[str], settings: DatabaseSettings) -> None:
        self._urls = urls
        found = addresses(urls)
        self._kind = found[0].kind
        self._name = ", ".join(address.name for address in found)
        self._settings = settings
        self._engine: AsyncEngine | None = None
        self._active = 0
        self._idle = asyncio.Event()
        self._down: ConnectionFailed | None = None
        self._probe: asyncio.Event | None = None

    async def open(self) -> None:
        self._engine = make_engine(self._urls, self._settings)
        try:
            revision = await self.read(
                lambda connection: revision_of(cast("ServerConnection", connection).plain)
            )
            _check_schema(self._name, revision)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        while self._active:
            self._idle.clear()
            await self._idle.wait()
        await engine.dispose()

    async def read(self, operation: Operation[T]) -> T:
        return await self._run(operation, operation, commit=False)

    async def write(self, operation: Operation[T], *, again: Operation[T] | None = None) -> T:
        return await self._run(operation, again, commit=True)

    async def _run(self, operation: Operation[T], again: Operation[T] | None, *, commit: bool) -> T:
        engine = self._engine
        if engine is None:
            raise DatabaseUnavailable(f"The database {self._name} is not open.")
        self._active += 1
        try:
            return await self._run_with_retries(engine, operation, again, commit=commit)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _run_with_retries(
        self,
        engine: AsyncEngine,
        operation: Operation[T],
        again: Operation[T] | None,
        *,
        commit: bool,
    ) -> T:
        run, retries, looked_again = operation, 0, False
        max_retries = 0 if self._down else self._settings.retries
        while True:
            try:
                return await self._attempt(engine, run, commit=commit)
            except Conflict:
                # The commit of the lost attempt may have come after `again` looked for it.
                if run is operation or looked_again:
                    raise
                looked_again = True
                continue
            except (ConnectionFailed, ServerRefused, RolledBack, OutcomeUnknown) as error:
                if again is None:
                    raise
                if isinstance(error, OutcomeUnknown):
                    run = again
                if retries == max_retries or self._engine is None:
                    raise
                pause = self._settings.retry_backoff.total_seconds()
                if isinstance(error, RolledBack):
                    pause = min(pause, DEADLOCK_PAUSE)
                await asyncio.sleep(pause * 2**retries)
                retries += 1

    async def _attempt(self, engine: AsyncEngine, operation: Operation[T], *, commit: bool) -> T:
        async with self._probing():
            try:
                value = await self._transaction(engine, operation, commit=commit)
            except Exception as error:
                translated = translate(error, self._name)
                if isinstance(translated, ConnectionFailed):
                    self._down = translated
                if translated is error:
                    raise
                raise translated from error
            self._down = None
            return value

    @asynccontextmanager
    async def _probing(self) -> AsyncIterator[None]:
        """While the database is down, one call probes it and the others wait for its result."""
        if self._down is None:
            yield
        elif self._probe is not None:
            await self._probe.wait()
            if self._down is not None:
                raise ConnectionFailed(self._down.message)
            yield
        else:
            self._probe = asyncio.Event()
            try:
                yield
            finally:
                self._probe.set()
                self._probe = None

    async def _connect(self, engine: AsyncEngine) -> AsyncConnection:
        limit = self._settings.pool_timeout + self._settings.operation_timeout
        try:
            async with asyncio.timeout(limit.total_seconds()):
                return await engine.connect()
        except (OSError, EOFError, sa.exc.DBAPIError) as error:
            raise ConnectionFailed(translate(error, self._name).args[0]) from error

    async def _transaction(
        self, engine: AsyncEngine, operation: Operation[T], *, commit: bool
    ) -> T:
        connection = await self._connect(engine)
        try:
            async with asyncio.timeout(self._settings.operation_timeout.total_seconds()):
                if isinstance(operation, Change):
                    value: T = await send(self._kind, _driver(connection), operation)
                    return value
                return await _in_transaction(connection, operation, commit=commit)
        except BaseException as error:
            if not is_usable(error):
                await _drop(connection)
            raise
        finally:
            await connection.close()


class ServerConnection:
    """The connection that an operation gets."""

    def __init__(self, plain: sa.Connection) -> None:
        self.plain = plain

    def execute(self, statement: str, values: Mapping[str, object] | None = None, /) -> Rows:
        try:
            return Rows(self.plain.execute(_text(statement), values))
        except sa.exc.IntegrityError as error:
            if error_code(error) in UNIQUE_VIOLATIONS:
                raise UniqueViolation from error
            raise


class Rows:
    def __init__(self, result: sa.CursorResult[Any]) -> None:
        self._result = result

    @property
    def rowcount(self) -> int:
        return self._result.rowcount

    def fetchone(self) -> Row | None:
        row = self._result.fetchone()
        return None if row is None else NamedRow(row)

    def fetchall(self) -> list[Row]:
        return list(self)

    def __iter__(self) -> Iterator[Row]:
        return map(NamedRow, self._result)


class NamedRow:
    __slots__ = ("_row",)

    def __init__(self, row: sa.Row[Any]) -> None:
        self._row = row

    def __getitem__(self, column: str, /) -> Any:
        return self._row._mapping[column]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._row)


@lru_cache(maxsize=256)
def _text(statement: str) -> sa.TextClause:
    return sa.text(statement)


async def _in_transaction(
    connection: AsyncConnection, operation: Operation[T], *, commit: bool
) -> T:
    try:
        value = await connection.run_sync(lambda it: operation(ServerConnection(it)))
    except Exception as error:
        if is_usable(error):
            await connection.rollback()
        raise
    await (connection.commit() if commit else connection.rollback())
    return value


async def _drop(connection: AsyncConnection) -> None:
    """Discard a connection in an unknown state, so that the pool never hands it out."""
    plain = connection.sync_connection
    if plain is not None and not plain.closed and not plain.invalidated:
        abort(_driver(connection))
        await connection.invalidate()


def _driver(connection: AsyncConnection) -> Any:
    """The driver's connection."""
    assert connection.sync_connection is not None
    return connection.sync_connection.connection.driver_connection


def _check_schema(name: str, revision: str | None) -> None:
    match schema_state(revision):
        case SchemaState.MISSING:
            raise PermanentError(
                f"The database {name} has no tables of Atoll. Create them with `atoll db upgrade`.",
                code="schema_missing",
            )
        case SchemaState.OUTDATED:
            raise PermanentError(
                f"The schema of the database {name} is at {revision} and this version of Atoll "
                f"needs {HEAD}. Upgrade it with `atoll db upgrade`.",
                code="schema_outdated",
            )
        case SchemaState.UNKNOWN:
            raise PermanentError(
                f"The schema of the database {name} is at {revision}, which this version of Atoll "
                "does not know. It belongs to another version, probably a newer one. Start that "
                "version; `atoll db upgrade` of this version would fail.",
                code="database_unknown_version",
            )
