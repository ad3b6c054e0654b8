"""
The way from any older schema to the newest one, by alembic.

Run from here rather than from an alembic.ini: the migrations travel inside the wheel. Each run is
one transaction.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import StaticPool, create_engine

from atoll.errors import PermanentError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

_alembic = Lock()
"""Alembic keeps what it is doing in globals, so two stores of one process take turns."""


def upgrade(connection: sqlite3.Connection, revision: str = "head") -> None:
    with _transaction(connection) as configured:
        try:
            command.upgrade(configured, revision)
        except CommandError as error:
            raise PermanentError(
                "The database was written by another version of Atoll, probably a newer one: "
                f"{error}. Start that version, or restore a backup.",
                code="database_unknown_version",
            ) from error


def downgrade(connection: sqlite3.Connection, revision: str) -> None:
    with _transaction(connection) as configured:
        command.downgrade(configured, revision)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[Config]:
    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    with _alembic, engine.begin() as wrapped:
        wrapped.exec_driver_sql("BEGIN IMMEDIATE")
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
        config.attributes["connection"] = wrapped
        yield config
