"""
Column types of migrations, and their operations: those of alembic, which on MariaDB skip what
exists already. Both stay as they are, or former migrations would make another schema.

MariaDB commits each operation separately, so an interrupted migration runs again from its start. On
other databases it leaves nothing behind, and an object that exists already is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Sequence


def words(length: int) -> sa.String:
    """Text that compares by its bytes everywhere, as it does in SQLite."""
    return (
        sa.String(length)
        .with_variant(mysql.VARCHAR(length, collation="utf8mb4_nopad_bin"), "mysql", "mariadb")
        .with_variant(sa.String(length, collation="C"), "postgresql")
    )


ID = words(64)
WORD = words(32)
NAME = words(255)
TIME = sa.BigInteger()
JSON = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""Only a column of this type is numbered automatically by SQLite."""


def create_table(name: str, *columns: sa.Column[Any]) -> None:
    if _is_repeatable() and _has(name):
        if _columns(name) != {column.name for column in columns}:
            raise PermanentError(
                f"The database has a table {name} that is not Atoll's. Give Atoll its own "
                "database, or drop the table if it is not needed.",
                code="schema_conflict",
            )
        return
    op.create_table(name, *columns)


def drop_table(name: str) -> None:
    if not _is_repeatable() or _has(name):
        op.drop_table(name)


def create_index(name: str, table: str, columns: Sequence[str], *, unique: bool = False) -> None:
    if not _is_repeatable() or name not in _indexes(table):
        op.create_index(name, table, columns, unique=unique)


def drop_index(name: str, table: str) -> None:
    if not _is_repeatable() or name in _indexes(table):
        op.drop_index(name, table)


def add_column(table: str, column: sa.Column[Any]) -> None:
    if not _is_repeatable() or column.name not in _columns(table):
        op.add_column(table, column)


def drop_column(table: str, name: str) -> None:
    if not _is_repeatable() or name in _columns(table):
        op.drop_column(table, name)


def _is_repeatable() -> bool:
    return op.get_bind().dialect.name in ("mysql", "mariadb")


def _inspector() -> sa.Inspector:
    """A new inspector each time, because it caches."""
    return sa.inspect(op.get_bind())


def _has(table: str) -> bool:
    return _inspector().has_table(table)


def _indexes(table: str) -> set[str | None]:
    return {index["name"] for index in _inspector().get_indexes(table)}


def _columns(table: str) -> set[str]:
    return {column["name"] for column in _inspector().get_columns(table)}
