"""
The schema's revision: which one a database has and which one this version of Atoll needs.

Opening a SQLite database upgrades it, in one transaction for which other processes wait: a new file
gets `schema.sql`, an older one the migrations that it lacks. A test ensures that both lead to the
same schema. A database on a server may be shared by replicas of different versions, so only
`atoll db upgrade` changes it.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Connection

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
"""All migrations, oldest first."""

HEAD = REVISIONS[-1]
"""The newest migration."""


class SchemaState(StrEnum):
    MISSING = "missing"
    OUTDATED = "outdated"
    CURRENT = "current"
    UNKNOWN = "unknown"
    """Made by another version of Atoll, probably a newer one."""


def schema_state(revision: str | None) -> SchemaState:
    if not revision:
        return SchemaState.MISSING
    if revision == HEAD:
        return SchemaState.CURRENT
    return SchemaState.OUTDATED if revision in REVISIONS else SchemaState.UNKNOWN


def revision_of(connection: Connection) -> str | None:
    """The revision of any database, used with `run_sync`; None if it has no schema."""
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    row = connection.exec_driver_sql("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def ensure_schema(connection: sqlite3.Connection) -> None:
    revision = sqlite_revision(connection)
    if revision is None:
        _create(connection)
    elif revision != HEAD:
        # Imported only here: loading alembic takes most of a second.
        from atoll.stores.sql import migrations

        migrations.upgrade(connection)


def sqlite_revision(connection: sqlite3.Connection) -> str | None:
    """The revision of a SQLite database; None if it is new."""
    if not connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    ).fetchone():
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else ""


def _create(connection: sqlite3.Connection) -> None:
    script = resources.files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have created it while this one waited for the lock.
        if sqlite_revision(connection) is None:
            for statement in script.split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO alembic_version VALUES (?)", (HEAD,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
