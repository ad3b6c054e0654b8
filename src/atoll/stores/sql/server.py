"""
MariaDB and PostgreSQL: a pool of connections, and patience with a database that goes away.

Each attempt at an operation has a connection and a transaction of its own, and an end. Reads are
tried again after a broken connection or a deadlock, and so are writes that say how (`again`), since
nobody knows whether what was cut off was committed. Those of several steps are not: who asked for
them decides anew. While
the database is known to be down each call makes one attempt, and calls that come meanwhile share
its fate: a queue of callers that all wait out the pauses would help nobody.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy as sa

from atoll.errors import Conflict, DatabaseUnavailable, PermanentError
from atoll.stores.sql.connect import make_engine, sever
from atoll.stores.sql.dsn import addresses
from atoll.stores.sql.engine import Taken
from atoll.stores.sql.faults import (
    TAKEN,
    Lost,
    Refused,
    RolledBack,
    Unreached,
    number,
    translate,
    usable,
)
from atoll.stores.sql.schema import HEAD, State, revision_of, state_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from atoll.settings import DatabaseSettings
    from atoll.stores.sql.engine import Operation, Row, T

# Nobody is gone after a deadlock, so what lost it need not wait for long.
DEADLOCK_PAUSE = 0.02


class ServerEngine:
    """Runs operations through a pool. Belongs to the event loop that opened it."""

    # Rows come whole and all at once.
    rows_at_once: int | None = 16

    def __init__(self, urls: Sequence[str], settings: DatabaseSettings) -> None:
        self._urls = urls
        self._name = ", ".join(address.name for address in addresses(urls))
        self._settings = settings
        self._engine: AsyncEngine | None = None
        self._under_way = 0
        self._idle = asyncio.Event()
        self._down: Unreached | None = None
        self._probe: asyncio.Event | None = None

    async def open(self) -> None:
        self._engine = make_engine(self._urls, self._settings)
        try:
            revision = await self.read(
                lambda connection: revision_of(cast("ServerConnection", connection).plain)
            )
            _insist_on_schema(self._name, revision)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        while self._under_way:
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
        self._under_way += 1
        try:
            return await self._persist(engine, operation, again, commit=commit)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _persist(
        self,
        engine: AsyncEngine,
        operation: Operation[T],
        again: Operation[T] | None,
        *,
        commit: bool,
    ) -> T:
        run, retries, settled = operation, 0, False
        patience = 0 if self._down else self._settings.retries
        while True:
            try:
                return await self._attempt(engine, run, commit=commit)
            except Conflict:
                # A commit that was under way when we lost sight of it may come after the look.
                if run is operation or settled:
                    raise
                settled = True
                continue
            except (Unreached, Refused, RolledBack, Lost) as error:
                if again is None:
                    raise
                if isinstance(error, Lost):
                    run = again
                if retries == patience or self._engine is None:
                    raise
                pause = self._settings.retry_backoff.total_seconds()
                if isinstance(error, RolledBack):
                    pause = min(pause, DEADLOCK_PAUSE)
                await asyncio.sleep(pause * 2**retries)
                retries += 1

    async def _attempt(self, engine: AsyncEngine, operation: Operation[T], *, commit: bool) -> T:
        async with self._turn():
            try:
                value = await self._transaction(engine, operation, commit=commit)
            except Exception as error:
                translated = translate(error, self._name)
                if isinstance(translated, Unreached):
                    self._down = translated
                if translated is error:
                    raise
                raise translated from error
            self._down = None
            return value

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """While the database is down, one finds out whether it still is and the others wait."""
        if self._down is None:
            yield
        elif self._probe is not None:
            await self._probe.wait()
            if self._down is not None:
                raise Unreached(self._down.message)
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
            raise Unreached(translate(error, self._name).args[0]) from error

    async def _transaction(
        self, engine: AsyncEngine, operation: Operation[T], *, commit: bool
    ) -> T:
        connection = await self._connect(engine)
        try:
            async with asyncio.timeout(self._settings.operation_timeout.total_seconds()):
                try:
                    value = await connection.run_sync(lambda it: operation(ServerConnection(it)))
                except Exception as error:
                    if usable(error):
                        await connection.rollback()
                    raise
                await (connection.commit() if commit else connection.rollback())
            return value
        except BaseException as error:
            if not usable(error):
                await _drop(connection)
            raise
        finally:
            await connection.close()


class ServerConnection:
    """What an operation sees of a connection."""

    def __init__(self, plain: sa.Connection) -> None:
        self.plain = plain

    def execute(self, statement: str, values: Mapping[str, object] | None = None, /) -> Rows:
        try:
            return Rows(self.plain.execute(_text(statement), values))
        except sa.exc.IntegrityError as error:
            if number(error) in TAKEN:
                raise Taken from error
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


async def _drop(connection: AsyncConnection) -> None:
    """So that nobody gets it from the pool in the middle of something."""
    plain = connection.sync_connection
    if plain is not None and not plain.closed and not plain.invalidated:
        sever(plain.connection.driver_connection)
        await connection.invalidate()


def _insist_on_schema(name: str, revision: str | None) -> None:
    match state_of(revision):
        case State.MISSING:
            raise PermanentError(
                f"The database {name} has no tables of Atoll; make them with `atoll db upgrade`.",
                code="schema_missing",
            )
        case State.OUTDATED:
            raise PermanentError(
                f"The schema of the database {name} is at {revision} and this version of Atoll "
                f"needs {HEAD}; bring it up with `atoll db upgrade`.",
                code="schema_outdated",
            )
        case State.UNKNOWN:
            raise PermanentError(
                f"The schema of the database {name} is at {revision}, which this version of Atoll "
                f"does not know: it was written by another, probably a newer one. Start that "
                "version; `atoll db upgrade` of this one cannot help.",
                code="database_unknown_version",
            )
