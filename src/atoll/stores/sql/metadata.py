"""The tables as SQLAlchemy describes them, which alembic compares databases with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from atoll.stores.sql import tables
from atoll.stores.sql.columns import Column, ColumnType, Storage, Table

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

metadata = sa.MetaData()


def _type(kind: ColumnType) -> TypeEngine[Any]:
    match kind.storage:
        case Storage.TEXT:
            binary = mysql.VARCHAR(kind.length, collation="utf8mb4_nopad_bin")
            return (
                sa.String(kind.length)
                .with_variant(binary, "mysql", "mariadb")
                .with_variant(sa.String(kind.length, collation="C"), "postgresql")
            )
        case Storage.JSON:
            return sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
        case Storage.BYTES:
            return sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
        case Storage.INTEGER:
            return sa.Integer()
        case Storage.BIGINT:
            return sa.BigInteger()
        case Storage.DOUBLE:
            return sa.Double()
        case Storage.SERIAL:
            # SQLite numbers the rows of a column of this type alone.
            return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(column: Column) -> sa.Column[Any]:
    return sa.Column(
        column.name,
        _type(column.type),
        primary_key=column.primary_key,
        nullable=column.null,
        server_default=None if column.default is None else sa.text(column.default),
        autoincrement=column.type.storage is Storage.SERIAL,
    )


def _add(table: Table) -> None:
    sa.Table(
        table.name,
        metadata,
        *map(_column, table.columns.values()),
        *(sa.Index(index.name, *index.columns, unique=index.unique) for index in table.indexes),
    )


for _table in tables.TABLES:
    _add(_table)
