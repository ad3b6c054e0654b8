"""
The way from any schema to any other, by alembic.

Run from here rather than from an alembic.ini: the migrations travel inside the wheel. On any
database one run at a time changes the schema and others wait for it. On SQLite and PostgreSQL a run
is one transaction. MariaDB commits each statement by itself; there the migrations leave out what an
interrupted run has done already (`steps`), so that it is finished by running it again.

Alembic keeps what it is doing in globals. Threads take turns; an event loop must not run two at
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

WAIT = 600
"""Seconds that a run waits for another one."""

POSTGRESQL_LOCK = 0x61746F6C6C  # "atoll"; PostgreSQL keeps locks apart by database.
_LOCK_NOT_AVAILABLE = "55P03"
# Names of locks are the whole server's, and 64 characters long at most.
MARIADB_LOCK = "CONCAT('atoll.', MD5(DATABASE()))"

_alembic = Lock()


def upgrade(connection: sqlite3.Connection | Connection, revision: str = "head") -> None:
    """A connection of SQLAlchemy must be in no transaction; it is in none afterwards."""
    _run(connection, command.upgrade, revision)


def downgrade(connection: sqlite3.Connection | Connection, revision: str) -> None:
    """What the newer schema holds and the older does not is lost."""
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
                "The database was written by another version of Atoll, probably a newer one: it "
                f"is at {found} and this version knows none after {HEAD}. Start that version, or "
                "restore a backup.",
                code="database_unknown_version",
            )
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
        config.attributes["connection"] = held
        try:
            change(config, revision)
        except CommandError as error:
            raise InvalidRequest(
                f"No way leads from {found or 'an empty database'} to {revision}: {error}.",
                code="unknown_revision",
            ) from error


def _exclusive(
    connection: sqlite3.Connection | Connection,
) -> AbstractContextManager[Connection]:
    """The connection in a transaction, while nobody else changes the schema."""
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
        # The store knows what the errors of sqlite3 mean.
        raise error.orig or error from error


@contextmanager
def _postgresql(connection: Connection) -> Iterator[Connection]:
    # A snapshot from before the wait would not see what the other run did.
    connection.execution_options(isolation_level="READ COMMITTED")
    with _explained("Nothing was changed."), connection.begin():
        connection.execute(text(f"SET LOCAL lock_timeout = '{WAIT}s'"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({POSTGRESQL_LOCK})"))
        yield connection


@contextmanager
def _mariadb(connection: Connection) -> Iterator[Connection]:
    with _explained("What was done before stays; run it again to go on from there."):
        if connection.scalar(text(f"SELECT GET_LOCK({MARIADB_LOCK}, {WAIT})")) != 1:
            raise _busy()
        connection.commit()
        try:
            with connection.begin():
                yield connection
            # After the commit: who waits for the lock must see what was done.
            connection.execute(text(f"DO RELEASE_LOCK({MARIADB_LOCK})"))
            connection.commit()
        except BaseException:
            connection.invalidate()  # The lock goes with the connection.
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
            "A step of the migration took longer than the database URL's command_timeout allows; "
            f"run it with a URL without that. {afterwards}",
            code="upgrade_failed",
        ) from error


def _busy() -> TemporaryError:
    return TemporaryError(
        f"Others have been using or changing the tables for {WAIT} seconds; try again later.",
        code="upgrade_running",
    )
