"""
The contract between the modules of the nouns and a database: an engine runs operations.

An operation is a function of a connection: plain SQL, short, without side effects beyond the
database, and safe to run twice, because a transaction that failed is run again. It may pass values
that its statement does not name, and reads columns by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Row(Protocol):
    def __getitem__(self, column: str, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        """The values."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int:
        """Rows that an update or a delete matched, changed or not."""

    def fetchone(self) -> Row | None: ...

    def fetchall(self) -> list[Row]: ...

    def __iter__(self) -> Iterator[Row]: ...


class Connection(Protocol):
    def execute(self, statement: str, values: Mapping[str, object] = ..., /) -> Cursor:
        """
        Values are named `:name` in the statement. Raises `UniqueViolation`, or on SQLite
        `sqlite3.IntegrityError`.
        """


Operation = Callable[[Connection], T]


class UniqueViolation(Exception):
    """A row with this unique value exists already."""


class Engine(Protocol):
    """Belongs to the event loop that opened it. Every operation is a transaction."""

    rows_at_once: int | None
    """How many rows of a result may be in memory at once; None if rows are fetched one by one."""

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Returns when all operations that were passed before have ended."""

    def read(self, operation: Operation[T]) -> Awaitable[T]:
        """Run an operation that does not write."""

    def write(self, operation: Operation[T], *, again: Operation[T] | None = None) -> Awaitable[T]:
        """
        Run an operation and commit; durable when the result is returned. If it is not known whether
        an attempt was committed, `again` runs next and has to find out; without `again` the write
        fails with `DatabaseUnavailable`.
        """
