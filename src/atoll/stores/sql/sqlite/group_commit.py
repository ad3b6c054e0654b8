"""
Group commit: one thread and one connection for all writes.

All writes that were requested during one transaction go into the next one, so that many callers
share a commit; a single caller does not wait for others. A caller gets its result after the commit,
or the error if the commit failed. An operation that raises affects no other: its own changes are
undone, those of the rest of the batch are committed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.stores.sql.sqlite.calls import Call, ResultQueue


class WriterThread:
    def __init__(
        self,
        connection: sqlite3.Connection,
        results: ResultQueue,
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._connection = connection
        self._results = results
        self._translate = translate
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="atoll-sql-writer", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        self._calls.put(call)

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
                    self._commit(batch)
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
