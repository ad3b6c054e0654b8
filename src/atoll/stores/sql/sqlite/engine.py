"""
SQLite: threads, the setup of connections, and the translation of errors.

Several processes may use a file: WAL allows reads during a write, and the writes of several
processes wait for each other up to the busy timeout. `:memory:` exists in one connection only, so
the writer's thread does the reads as well.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import DatabaseUnavailable, InvalidRequest, PermanentError
from atoll.stores.sql.dsn import MEMORY
from atoll.stores.sql.revisions import ensure_schema
from atoll.stores.sql.sqlite.calls import Call, ResultQueue
from atoll.stores.sql.sqlite.group_commit import LoopCommits, WriterThread
from atoll.stores.sql.sqlite.readers import ReaderThreads
from atoll.stores.sql.writes import Change

if TYPE_CHECKING:
    from atoll.settings import SqliteSettings
    from atoll.stores.sql.engine import Operation, T

READERS = 2


class SqliteEngine:
    """Runs operations in database threads; used by the event loop that opened it."""

    rows_at_once: int | None = None

    def __init__(self, database: str, settings: SqliteSettings) -> None:
        """`database` is a file's path or `:memory:`."""
        self._database = database
        self._settings = settings
        self._writer: WriterThread | None = None
        self._readers: ReaderThreads | None = None
        self._loop_commits: LoopCommits | None = None

    async def open(self) -> None:
        writer, readers = await asyncio.to_thread(self._connections)
        loop, settings = asyncio.get_running_loop(), self._settings
        results = ResultQueue(loop)
        wait = settings.busy_timeout.total_seconds()
        self._writer = WriterThread(writer, results, self._translate, wait)
        if settings.journal_mode == "WAL" and settings.synchronous in ("OFF", "NORMAL"):
            # Otherwise each commit waits for the disk.
            self._loop_commits = LoopCommits(loop, self._writer)
        self._readers = ReaderThreads(readers, results, self._translate) if readers else None

    async def close(self) -> None:
        """Returns when all operations that were passed before have ended."""
        if self._loop_commits is not None:
            self._loop_commits.pass_on()
        threads = [thread for thread in (self._readers, self._writer) if thread is not None]
        self._readers = self._writer = self._loop_commits = None
        for thread in threads:
            thread.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join)

    def write(
        self, operation: Operation[T], *, again: Operation[T] | None = None
    ) -> asyncio.Future[T]:
        """
        Run an operation in a transaction, which it may share with others; durable when the future
        is done. `again` is not needed: the outcome of a transaction is always known.
        """
        target: WriterThread | LoopCommits | None = self._writer
        if self._loop_commits is not None:
            if isinstance(operation, Change):
                target = self._loop_commits
            else:
                self._loop_commits.pass_on()
        return self._put(target, operation)

    def read(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run an operation that does not write."""
        return self._put(self._readers or self._writer, operation)

    def _put(
        self, target: WriterThread | ReaderThreads | LoopCommits | None, operation: Operation[T]
    ) -> asyncio.Future[T]:
        if target is None:
            raise DatabaseUnavailable(f"The database {self._database} is not open.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        target.put(Call(operation, future))
        return future

    def _connections(self) -> tuple[sqlite3.Connection, list[sqlite3.Connection]]:
        """The writer's connection, after upgrading the schema, and the readers' connections."""
        try:
            with ExitStack() as opened:
                if self._database != MEMORY:
                    create_file(Path(self._database))
                writer = opened.enter_context(closing(self._connect()))
                ensure_schema(writer)
                readers = []
                for _ in range(0 if self._database == MEMORY else READERS):
                    reader = opened.enter_context(closing(self._connect()))
                    reader.execute("PRAGMA query_only = ON")
                    readers.append(reader)
                opened.pop_all()
                return writer, readers
        except (sqlite3.Error, OSError) as error:
            raise self._translate(error) from error

    def _connect(self) -> sqlite3.Connection:
        # Opened in one thread and used in another, never in two at once.
        connection = sqlite3.connect(
            self._database,
            timeout=self._settings.busy_timeout.total_seconds(),
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.row_factory = sqlite3.Row
            connection.execute(f"PRAGMA cache_size = -{self._settings.cache // 1024}")
            connection.execute(f"PRAGMA foreign_keys = {int(self._settings.foreign_keys)}")
            connection.execute("PRAGMA temp_store = MEMORY")
            self._set_journal_mode(connection)
            connection.execute(f"PRAGMA synchronous = {self._settings.synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_journal_mode(self, connection: sqlite3.Connection) -> None:
        """Waits for other processes: SQLite's busy timeout does not apply to this statement."""
        mode = self._settings.journal_mode
        deadline = time.monotonic() + self._settings.busy_timeout.total_seconds()
        while True:
            try:
                connection.execute(f"PRAGMA journal_mode = {mode}").fetchall()
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)
            else:
                return

    def _translate(self, error: Exception) -> Exception:
        return translate(error, self._database)


def create_file(path: Path) -> None:
    """Create a file that only its owner can read; SQLite gives its log the same mode."""
    # Never open an existing one: closing it would drop the locks that other connections of this
    # process hold on it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def translate(error: Exception, database: str) -> Exception:
    """The AtollError for an error of SQLite; the error itself if it is a bug in Atoll."""
    translated: Exception
    match error:
        case sqlite3.OperationalError() | OSError():
            translated = DatabaseUnavailable(_unavailable(error, database))
        case UnicodeEncodeError():
            translated = InvalidRequest("An id or a name contains an unpaired surrogate.")
        case _ if type(error) is sqlite3.DatabaseError:
            translated = PermanentError(
                f"The database {database} is damaged ({error}). Restore it from a backup.",
                code="database_damaged",
            )
        case _:
            return error
    translated.__cause__ = error
    return translated


def _unavailable(error: sqlite3.OperationalError | OSError, database: str) -> str:
    if isinstance(error, OSError):
        return f"The database {database} cannot be created: {error.strerror}."
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return f"The disk with the database {database} is full. Free some space on it."
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"The database {database} was locked by another process for too long."
        case sqlite3.SQLITE_READONLY:
            return f"This process may not write to the database {database}. Check its mode."
        case sqlite3.SQLITE_CANTOPEN:
            return f"The database {database} cannot be opened. Check its directory and mode."
        case _:
            return f"The database {database} is not available: {error}."
