"""
Bringing a SQLite database up to the schema of this version.

A new database gets `schema.sql` at once, an older one the migrations that it lacks; a test holds
the two to the same result. Either way in one transaction, for which other processes wait.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

HEAD = "0002"
"""The newest migration."""


def ensure_schema(connection: sqlite3.Connection) -> None:
    revision = current(connection)
    if revision is None:
        _create(connection)
    elif revision != HEAD:
        # Only here: loading alembic takes most of a second.
        from atoll.stores.sql import migrations

        migrations.upgrade(connection)


def current(connection: sqlite3.Connection) -> str | None:
    """The migration that the database is at; none when it is new."""
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
        # Another process may have come first while this one waited for the lock.
        if current(connection) is None:
            for statement in script.split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO alembic_version VALUES (?)", (HEAD,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
