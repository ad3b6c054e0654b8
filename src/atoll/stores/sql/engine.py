"""
What the modules of the nouns ask of a database: to run an operation.

An operation is a function of a connection: plain SQL, short, free of side effects beyond the
database and safe to run twice, because a transaction that failed is run again. It may hand over
values that its statement does not name, and reads columns by their names.
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
        """Values are named `:name` in the statement. Raises `Taken` or `sqlite3.IntegrityError`."""


Operation = Callable[[Connection], T]


class Taken(Exception):
    """A unique value is there already."""


class Engine(Protocol):
    """Belongs to the event loop that opened it. Every operation is a transaction."""

    rows_at_once: int | None
    """How many rows of a result may be in memory at once; None where they come one by one."""

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Returns when what was asked for before is done."""

    def read(self, operation: Operation[T]) -> Awaitable[T]:
        """Run it where it may not write."""

    def write(self, operation: Operation[T], *, again: Operation[T] | None = None) -> Awaitable[T]:
        """
        Durable when the answer is there. After an attempt of which nobody knows whether it was
        committed `again` is run, which has to find out; without it such a write has failed.
        """
