"""
Group commit: one connection for all writes, and a thread that uses it.

All writes that were requested during one transaction go into the next one, so that many callers
share a commit; a single caller does not wait for others. A caller gets its result after the commit,
or the error if the commit failed. An operation that raises affects no other: its own changes are
undone, those of the rest of the batch are committed.

Passing a small write to a thread and back costs more than the write. So the event loop commits
those of one turn together itself, in its next turn, unless the thread is at work. It never waits
there: whatever fails, for example because another process is writing, is left to the thread.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from atoll.stores.sql.sqlite.calls import Call, ResultQueue

CHECKPOINT_PAGES = 4000
"""
Pages in the log before a commit moves them to the database file, which costs two fsyncs. Four times
SQLite's default makes writes a tenth faster and keeps the log at 16 MB.
"""
MAX_IN_A_ROW = 100
"""Commits of the event loop until one of the thread, which may move pages."""


class WriterThread:
    def __init__(
        self,
        connection: sqlite3.Connection,
        results: ResultQueue,
        translate: Callable[[Exception], Exception],
        busy_timeout: float,
    ) -> None:
        self._connection = connection
        self._results = results
        self._translate = translate
        self._busy_timeout = int(busy_timeout * 1000)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._put = 0
        self._finished = 0
        self._allow_waits(0, 0)
        self._thread = Thread(target=self._work, name="atoll-sql-writer", daemon=True)
        self._thread.start()

    def _allow_waits(self, busy_timeout: int, checkpoint_pages: int) -> None:
        """For how long commits from now on may wait for other processes and for the disk."""
        self._connection.execute(f"PRAGMA busy_timeout = {busy_timeout}").fetchall()
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}").fetchall()

    def put(self, call: Call) -> None:
        self._put += 1
        self._calls.put(call)

    def try_commit(self, batch: list[Call]) -> bool:
        """Commit in the caller's thread; false if nothing was done, and the thread has to."""
        if self._put != self._finished:
            return False
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._run(batch)
            connection.execute("COMMIT")
        except Exception:  # noqa: BLE001 the thread repeats it, and reports what fails
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return False
        return True

    def stop(self) -> None:
        """End after the calls that were put before; none may be put afterwards."""
        self._calls.put(None)

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        with closing(self._connection):
            stopping = False
            while not stopping:
                batch = []
                for call in self._take_all():
                    if call is None:
                        stopping = True
                    else:
                        batch.append(call)
                if batch:
                    self._allow_waits(self._busy_timeout, CHECKPOINT_PAGES)
                    self._commit(batch)
                    self._allow_waits(0, 0)
                    # From here on the event loop may use the connection.
                    self._finished += len(batch)
                    self._results.put(batch)

    def _take_all(self) -> list[Call | None]:
        taken = [self._calls.get()]
        while not self._calls.empty():
            taken.append(self._calls.get())
        return taken

    def _commit(self, batch: list[Call]) -> None:
        try:
            try:
                self._transaction(self._run, batch)
            except sqlite3.OperationalError:
                raise
            except Exception:
                # Rare: one operation was refused. Savepoints show which one, but would slow down
                # every batch, so they are used only now.
                if len(batch) == 1:
                    raise
                self._transaction(self._run_with_savepoints, batch)
        except Exception as error:  # noqa: BLE001 passed to every caller; the thread must survive
            for call in batch:
                call.error = self._translate(error)

    def _transaction(self, run: Callable[[list[Call]], None], batch: list[Call]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            run(batch)
            self._connection.execute("COMMIT")
        except BaseException:
            # After some errors, such as a full disk, SQLite has ended the transaction already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _run(self, batch: list[Call]) -> None:
        connection = self._connection
        for call in batch:
            call.value = call.operation(connection)

    def _run_with_savepoints(self, batch: list[Call]) -> None:
        connection = self._connection
        for call in batch:
            connection.execute("SAVEPOINT operation")
            try:
                call.value = call.operation(connection)
            except sqlite3.OperationalError:
                raise
            except Exception as error:  # noqa: BLE001 passed to its caller
                connection.execute("ROLLBACK TO operation")
                call.error = self._translate(error)
            connection.execute("RELEASE operation")


class LoopCommits:
    """The small writes of a turn of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: WriterThread) -> None:
        self._loop = loop
        self._writer = writer
        self._batch: list[Call] = []
        self._in_a_row = 0

    def put(self, call: Call) -> None:
        if not self._batch:
            self._loop.call_soon(self._commit)
        self._batch.append(call)

    def pass_on(self) -> None:
        """Leave what is not committed yet to the thread, so that what follows comes later."""
        for call in self._take():
            self._writer.put(call)

    def _take(self) -> list[Call]:
        batch, self._batch = self._batch, []
        return batch

    def _commit(self) -> None:
        batch = self._take()
        if not batch:
            return  # It was passed on.
        self._in_a_row += 1
        if self._in_a_row <= MAX_IN_A_ROW and self._writer.try_commit(batch):
            for call in batch:
                call.deliver()
        else:
            self._in_a_row = 0
            for call in batch:
                self._writer.put(call)
