"""
The two kinds of write that can be refused: inserting an id, and compare-and-set by version.

Each has a second form for the attempt that follows one whose outcome is not known, because the
connection broke during its commit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.errors import AlreadyExists, VersionConflict
from atoll.stores.sql.engine import UniqueViolation

if TYPE_CHECKING:
    from atoll.errors import Conflict
    from atoll.stores.sql.engine import Connection, Engine, Operation, Row

T = TypeVar("T")

Statement = tuple[str, Mapping[str, object]]
"""A statement, and the values that it names."""

_EXISTS = (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)


@dataclass(frozen=True, slots=True)
class Change:
    """
    An operation that consists of one of these writes, and of an insert that follows it. An engine
    that knows that can send the statements together, with their commit.
    """

    statement: str
    row: Mapping[str, object]
    noun: str
    following: Statement | None = None

    def __call__(self, connection: Connection) -> None:
        if self.inserts:
            insert(connection, self.statement, self.row, self.noun)
        else:
            compare_and_set(connection, self.statement, self.row, self.noun)
        if self.following is not None:
            connection.execute(*self.following)

    @property
    def inserts(self) -> bool:
        return self.statement.startswith("INSERT")

    def refusal(self) -> Conflict:
        """The error if the row exists already, or is no longer at its version."""
        return _exists(self.row, self.noun) if self.inserts else _changed(self.row, self.noun)


def insert(connection: Connection, statement: str, row: Mapping[str, object], noun: str) -> None:
    try:
        connection.execute(statement, row)
    except (sqlite3.IntegrityError, UniqueViolation) as error:
        if isinstance(error, sqlite3.IntegrityError) and error.sqlite_errorcode not in _EXISTS:
            raise
        raise _exists(row, noun) from error


async def find_or_insert(
    engine: Engine, write: Operation[T], again: Operation[T] | None = None
) -> T:
    """
    Run an operation that inserts a row if it does not find it, once more if another process inserts
    the row in between.
    """
    try:
        return await engine.write(write, again=again or write)
    except AlreadyExists:
        return await engine.write(write, again=again or write)


def was_inserted(connection: Connection, select: str, row: Mapping[str, object], noun: str) -> bool:
    """Whether the earlier attempt inserted the row; `AlreadyExists` if the id has another row."""
    found = connection.execute(select, row).fetchone()
    if found is None:
        return False
    if not _equals(found, row):
        raise _exists(row, noun)
    return True


def compare_and_set(
    connection: Connection, statement: str, row: Mapping[str, object], noun: str
) -> None:
    """Run an update that names `id` and `version`; `row` has the version that was read."""
    if connection.execute(statement, row).rowcount == 0:
        raise _changed(row, noun)


def compare_and_set_again(
    connection: Connection, statement: str, select: str, row: Mapping[str, Any], noun: str
) -> bool:
    """
    Whether this attempt wrote the row. If the earlier one did, the row is already as it should be.
    """
    if connection.execute(statement, row).rowcount > 0:
        return True
    found = connection.execute(select, row).fetchone()
    if found is None or not _equals(found, {**row, "version": row["version"] + 1}):
        raise _changed(row, noun)
    return False


def _equals(found: Row, row: Mapping[str, object]) -> bool:
    return all(found[name] == value for name, value in row.items())


def _exists(row: Mapping[str, object], noun: str) -> AlreadyExists:
    return AlreadyExists(f"{noun} {row['id']} exists already.")


def _changed(row: Mapping[str, object], noun: str) -> VersionConflict:
    return VersionConflict(
        f"{noun} {row['id']} is no longer at version {row['version']}: another client changed or "
        "removed it. Read it again."
    )
