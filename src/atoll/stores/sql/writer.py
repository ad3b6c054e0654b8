"""
Group commit: one thread and one connection for all writes.

Everything that was asked for while a transaction was under way goes into the next one, so that many
callers share one commit; a lone caller does not wait for company. Callers hear of their operation
after the commit, or all of them hear why it failed. An operation that raises takes nothing else
with it: its own changes are undone, those of its neighbours are committed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.stores.sql.calls import Answers, Call


class Writer:
    def __init__(
        self,
        connection: sqlite3.Connection,
        answers: Answers,
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._connection = connection
        self._answers = answers
        self._translate = translate
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="atoll-sql-writer", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        self._calls.put(call)

    def stop(self) -> None:
        """End after what was put before; nothing may be put later."""
        self._calls.put(None)

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        with closing(self._connection):
            stopping = False
            while not stopping:
                batch = []
                for call in self._gather():
                    if call is None:
                        stopping = True
                    else:
                        batch.append(call)
                if batch:
                    self._settle(batch)
                    self._answers.put(batch)

    def _gather(self) -> list[Call | None]:
        gathered = [self._calls.get()]
        while not self._calls.empty():
            gathered.append(self._calls.get())
        return gathered

    def _settle(self, batch: list[Call]) -> None:
        try:
            try:
                self._transaction(self._run, batch)
            except sqlite3.OperationalError:
                raise
            except Exception:
                # One of them was refused, which is rare. Savepoints would have told which one, but
                # cost all the others time; so they come only now.
                if len(batch) == 1:
                    raise
                self._transaction(self._run_apart, batch)
        except Exception as error:  # noqa: BLE001 each caller gets it, and the thread must live on
            for call in batch:
                call.error = self._translate(error)

    def _transaction(self, run: Callable[[list[Call]], None], batch: list[Call]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            run(batch)
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite has ended the transaction itself after some errors, such as a full disk.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _run(self, batch: list[Call]) -> None:
        connection = self._connection
        for call in batch:
            call.value = call.operation(connection)

    def _run_apart(self, batch: list[Call]) -> None:
        connection = self._connection
        for call in batch:
            connection.execute("SAVEPOINT operation")
            try:
                call.value = call.operation(connection)
            except sqlite3.OperationalError:
                raise
            except Exception as error:  # noqa: BLE001 its caller gets it
                connection.execute("ROLLBACK TO operation")
                call.error = self._translate(error)
            connection.execute("RELEASE operation")
