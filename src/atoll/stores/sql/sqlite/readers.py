"""
Threads with connections of their own, which run reads beside the writer.

A read sees every write whose result was returned before the read was requested. Several reads may
run at the same time, so that a long one (a page of large outputs) does not block the others.
"""

from __future__ import annotations

from contextlib import closing
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from atoll.stores.sql.sqlite.calls import Call, ResultQueue


class ReaderThreads:
    def __init__(
        self,
        connections: Sequence[sqlite3.Connection],
        results: ResultQueue,
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._results = results
        self._translate = translate
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._work, args=(connection,), name="atoll-sql-reader", daemon=True)
            for connection in connections
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Call) -> None:
        self._calls.put(call)

    def stop(self) -> None:
        """End after the calls that were put before; none may be put afterwards."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self, connection: sqlite3.Connection) -> None:
        with closing(connection):
            while (call := self._calls.get()) is not None:
                try:
                    call.value = call.operation(connection)
                except Exception as error:  # noqa: BLE001 passed to its caller
                    call.error = self._translate(error)
                self._results.put((call,))
