"""
A few threads, each with a connection of its own, that run reads beside the writer.

A read sees every write that was answered before it was asked for. Two reads may run at the same
time, so a long one (a page of large outputs) does not hold up all others.
"""

from __future__ import annotations

from contextlib import closing
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from atoll.stores.sql.calls import Answers, Call


class Readers:
    def __init__(
        self,
        connections: Sequence[sqlite3.Connection],
        answers: Answers,
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._answers = answers
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
        """End after what was put before; nothing may be put later."""
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
                except Exception as error:  # noqa: BLE001 its caller gets it
                    call.error = self._translate(error)
                self._answers.put((call,))
