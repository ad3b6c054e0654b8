"""
Upgrades and downgrades of the schema, by alembic.

There is no alembic.ini, because the migrations are part of the wheel. One run at a time changes the
schema of a database; others wait for it. On SQLite and PostgreSQL a run is one transaction. MariaDB
commits each statement separately: there, migrations skip what an interrupted run has done already
(`steps`), so that running again completes it.

Alembic has global state, so threads take turns, and an event loop must not run two migrations at
once.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import StaticPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from atoll.errors import DatabaseUnavailable, InvalidRequest, PermanentError, TemporaryError
from atoll.stores.sql.revisions import HEAD, SchemaState, revision_of, schema_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection

LOCK_TIMEOUT = 600
"""Seconds to wait for another run."""

POSTGRESQL_LOCK = 0x61746F6C6C  # "atoll"; locks of PostgreSQL are per database.
_LOCK_NOT_AVAILABLE = "55P03"
# Lock names are global to the server and have at most 64 characters.
MARIADB_LOCK = "CONCAT('atoll.', MD5(DATABASE()))"

_alembic = Lock()


def upgrade(connection: sqlite3.Connection | Connection, revision: str = "head") -> None:
    """The connection must not be in a transaction, and is not afterwards."""
    _run(connection, command.upgrade, revision)


def downgrade(connection: sqlite3.Connection | Connection, revision: str) -> None:
    """Data that only the newer schema can hold is lost."""
    _run(connection, command.downgrade, revision)


def _run(
    connection: sqlite3.Connection | Connection,
    change: Callable[[Config, str], None],
    revision: str,
) -> None:
    with _alembic, _exclusive(connection) as held:
        found = revision_of(held)
        if schema_state(found) is SchemaState.UNKNOWN:
            raise PermanentError(
                f"The schema of the database is at {found}, which this version of Atoll does not "
                f"know: its newest is {HEAD}. Use the version that wrote it, or restore a backup.",
                code="database_unknown_version",
            )
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
        config.attributes["connection"] = held
        try:
            change(config, revision)
        except CommandError as error:
            raise InvalidRequest(
                f"Cannot migrate from {found or 'an empty database'} to {revision}: {error}.",
                code="unknown_revision",
            ) from error


def _exclusive(
    connection: sqlite3.Connection | Connection,
) -> AbstractContextManager[Connection]:
    """The connection in a transaction, with a lock on schema changes."""
    if isinstance(connection, sqlite3.Connection):
        return _sqlite(connection)
    if connection.dialect.name == "postgresql":
        return _postgresql(connection)
    return _mariadb(connection)


@contextmanager
def _sqlite(connection: sqlite3.Connection) -> Iterator[Connection]:
    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    try:
        with engine.begin() as wrapped:
            wrapped.exec_driver_sql("BEGIN IMMEDIATE")
            yield wrapped
    except DBAPIError as error:
        # The store translates errors of sqlite3.
        raise error.orig or error from error


@contextmanager
def _postgresql(connection: Connection) -> Iterator[Connection]:
    # A snapshot from before the wait would not contain the changes of the other run.
    connection.execution_options(isolation_level="READ COMMITTED")
    with _explained("Nothing was changed."), connection.begin():
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}s'"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({POSTGRESQL_LOCK})"))
        yield connection


@contextmanager
def _mariadb(connection: Connection) -> Iterator[Connection]:
    with _explained("Earlier steps are kept. Run it again to continue."):
        if connection.scalar(text(f"SELECT GET_LOCK({MARIADB_LOCK}, {LOCK_TIMEOUT})")) != 1:
            raise _busy()
        connection.commit()
        try:
            with connection.begin():
                yield connection
            # After the commit, so that the next run sees the changes.
            connection.execute(text(f"DO RELEASE_LOCK({MARIADB_LOCK})"))
            connection.commit()
        except BaseException:
            connection.invalidate()  # Releases the lock.
            raise


@contextmanager
def _explained(afterwards: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
            raise _busy() from error
        if error.connection_invalidated:
            raise DatabaseUnavailable(
                f"The connection to the database broke: {error.orig}. {afterwards}",
            ) from error
        raise PermanentError(
            f"The database refused a step of the migration: {error.orig}. {afterwards}",
            code="upgrade_failed",
        ) from error
    except TimeoutError as error:
        raise PermanentError(
            "A step of the migration exceeded command_timeout of the database URL. Run it with a "
            f"URL without that parameter. {afterwards}",
            code="upgrade_failed",
        ) from error


def _busy() -> TemporaryError:
    return TemporaryError(
        f"Other connections locked the tables for {LOCK_TIMEOUT} seconds. Try again later.",
        code="upgrade_running",
    )
