"""
What migrations are made of: alembic's operations, each of which may find itself done.

MariaDB commits each of them by itself, so a migration that was interrupted there is run again from
its beginning. Elsewhere it leaves nothing behind, and something that is there already is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Sequence


def create_table(name: str, *columns: sa.Column[Any]) -> None:
    if _may_be_repeated() and _has(name):
        if _columns(name) != {column.name for column in columns}:
            raise PermanentError(
                f"The database has a table {name} with other columns than Atoll's. Give Atoll a "
                "database of its own, or drop the table if nobody needs it.",
                code="schema_conflict",
            )
        return
    op.create_table(name, *columns)


def drop_table(name: str) -> None:
    if not _may_be_repeated() or _has(name):
        op.drop_table(name)


def create_index(name: str, table: str, columns: Sequence[str], *, unique: bool = False) -> None:
    if not _may_be_repeated() or name not in _indexes(table):
        op.create_index(name, table, columns, unique=unique)


def drop_index(name: str, table: str) -> None:
    if not _may_be_repeated() or name in _indexes(table):
        op.drop_index(name, table)


def add_column(table: str, column: sa.Column[Any]) -> None:
    if not _may_be_repeated() or column.name not in _columns(table):
        op.add_column(table, column)


def drop_column(table: str, name: str) -> None:
    if not _may_be_repeated() or name in _columns(table):
        op.drop_column(table, name)


def _may_be_repeated() -> bool:
    return op.get_bind().dialect.name in ("mysql", "mariadb")


def _inspector() -> sa.Inspector:
    """A new one each time: it remembers what it saw."""
    return sa.inspect(op.get_bind())


def _has(table: str) -> bool:
    return _inspector().has_table(table)


def _indexes(table: str) -> set[str | None]:
    return {index["name"] for index in _inspector().get_indexes(table)}


def _columns(table: str) -> set[str]:
    return {column["name"] for column in _inspector().get_columns(table)}
