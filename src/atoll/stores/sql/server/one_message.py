"""
Sends a `Change` and its commit in one message, past SQLAlchemy.

A round trip takes longer than the statement itself, and SQLAlchemy several times what the driver
does. PostgreSQL gets one statement, which is a transaction of its own: its insert adds a row for
each row that the part before it changed. MariaDB gets a block that fails before its insert if no
row was changed.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from atoll.stores.sql.dsn import Kind
from atoll.stores.sql.server.errors import UNIQUE_VIOLATIONS, error_code, is_usable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from atoll.stores.sql.writes import Change

_SIGNAL = 1644
"""MariaDB's number of the error that the block raises itself."""
_NAME = re.compile(r":(\w+)")


async def _send_postgresql(driver: Any, change: Change) -> bool:
    import asyncpg

    following, more = change.following or ("", {})
    statement, names, more_names = _postgresql(change.statement, following)
    row = change.row
    values = [row[name] for name in names] + [more[name] for name in more_names]
    with _translated(asyncpg.PostgresError, asyncpg.InterfaceError):
        # "INSERT 0 1" or "UPDATE 1".
        tag: str = await driver.execute(statement, *values)
    return not tag.endswith(" 0")


@lru_cache(maxsize=256)
def _postgresql(statement: str, following: str) -> tuple[str, list[str], list[str]]:
    """The statement, and the names of the values of both parts in their order."""
    names, more_names = _NAME.findall(statement), _NAME.findall(following)
    if following:
        into, _, inserted = following.partition(" VALUES ")
        following = f"{into} SELECT {inserted[1:-1]} FROM changed"  # noqa: S608
        statement = f"WITH changed AS ({statement} RETURNING 1) {following}"
    numbers = iter(range(1, len(names) + len(more_names) + 1))
    return _NAME.sub(lambda _: f"${next(numbers)}", statement), names, more_names


async def _send_mariadb(driver: Any, change: Change) -> bool:
    import pymysql

    text = _mariadb(change.statement) % _literals(driver, change.row)
    if not change.inserts:
        text += ";IF ROW_COUNT() = 0 THEN SIGNAL SQLSTATE '45000';END IF"
    if change.following is not None:
        following, values = change.following
        text += ";" + _mariadb(following) % _literals(driver, values)
    with _translated(pymysql.MySQLError):
        try:
            await driver.query(f"BEGIN NOT ATOMIC {text};COMMIT;END")
        except pymysql.MySQLError as error:
            refused = error_code(error) == _SIGNAL
            if refused or is_usable(_sqlalchemy_error(error)):
                await driver.rollback()
            if not refused:
                raise
            return False
    return True


@lru_cache(maxsize=256)
def _mariadb(statement: str) -> str:
    return _NAME.sub(r"%(\1)s", statement)


def _literals(driver: Any, values: Mapping[str, object]) -> dict[str, str]:
    return {name: driver.escape(value) for name, value in values.items()}


@contextmanager
def _translated(*errors: type[Exception]) -> Iterator[None]:
    """Raises these errors of a driver as SQLAlchemy does, which `server/errors.py` understands."""
    try:
        yield
    except errors as error:
        raise _sqlalchemy_error(error) from error


def _sqlalchemy_error(error: Exception) -> Exception:
    found: Exception = sa.exc.DBAPIError.instance(None, None, error, Exception)
    return found


_SEND: Mapping[Kind, Callable[[Any, Change], Awaitable[bool]]] = {
    Kind.MARIADB: _send_mariadb,
    Kind.POSTGRESQL: _send_postgresql,
}


async def send(kind: Kind, driver: Any, change: Change) -> Any:
    """
    Run and commit a change on a connection of a driver that is in no transaction. Returns None, as
    the change does.
    """
    try:
        matched = await _SEND[kind](driver, change)
    except sa.exc.DBAPIError as error:
        if error_code(error) in UNIQUE_VIOLATIONS:
            raise change.refusal() from error
        raise
    if not matched:
        raise change.refusal()
