"""
Between fields and columns, and the two kinds of write that can be refused.

Each has a second form for an attempt after one of which nobody knows whether it was committed.
"""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.stores.sql.engine import Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from atoll.stores.sql.engine import Connection, Row

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_EXISTS = (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)


def _encoder() -> Callable[[Any], str]:
    """As `JSONEncoder.encode`, which spends most of its time on making an encoder at every call."""
    plain = json.JSONEncoder(separators=(",", ":"))
    if c_make_encoder is None:
        return plain.encode
    separators, sort, skip, nan = (":", ","), False, False, True
    pieces = c_make_encoder(
        None, plain.default, encode_basestring_ascii, None, *separators, sort, skip, nan
    )
    return lambda value: "".join(pieces(value, 0))


encode = _encoder()
decode = json.JSONDecoder().decode


def encode_optional(value: Any) -> str | None:
    return None if value is None else encode(value)


def decode_optional(text: str | None) -> Any:
    return None if text is None else decode(text)


def micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def optional_micros(time: datetime | None) -> int | None:
    return None if time is None else micros(time)


def moment(value: int) -> datetime:
    return _EPOCH + timedelta(microseconds=value)


def optional_moment(value: int | None) -> datetime | None:
    return None if value is None else moment(value)


def insert(connection: Connection, statement: str, row: Mapping[str, object], what: str) -> None:
    try:
        connection.execute(statement, row)
    except (sqlite3.IntegrityError, Taken) as error:
        if isinstance(error, sqlite3.IntegrityError) and error.sqlite_errorcode not in _EXISTS:
            raise
        raise _exists(row, what) from error


def insert_again(
    connection: Connection, statement: str, get: str, row: Mapping[str, object], what: str
) -> None:
    """Insert what an attempt may have inserted that was cut off; `get` reads the row."""
    if not inserted(connection, get, row, what):
        insert(connection, statement, row, what)


def inserted(connection: Connection, get: str, row: Mapping[str, object], what: str) -> bool:
    """Whether such an attempt has; `Conflict` when another row has the id."""
    found = connection.execute(get, row).fetchone()
    if found is None:
        return False
    if not _holds(found, row):
        raise _exists(row, what)
    return True


def compare_and_set(
    connection: Connection, statement: str, row: Mapping[str, object], what: str
) -> None:
    """Run an update that names `id` and `version`; `row` holds the version that was read."""
    if connection.execute(statement, row).rowcount == 0:
        raise _moved_on(row, what)


def compare_and_set_again(
    connection: Connection, statement: str, get: str, row: Mapping[str, Any], what: str
) -> bool:
    """
    The same where an attempt was cut off: what it would have left is as good. Whether this one
    wrote it.
    """
    if connection.execute(statement, row).rowcount > 0:
        return True
    found = connection.execute(get, row).fetchone()
    if found is None or not _holds(found, {**row, "version": row["version"] + 1}):
        raise _moved_on(row, what)
    return False


def _holds(found: Row, row: Mapping[str, object]) -> bool:
    return all(found[name] == value for name, value in row.items())


def _exists(row: Mapping[str, object], what: str) -> Conflict:
    return Conflict(f"{what} {row['id']} exists already.")


def _moved_on(row: Mapping[str, object], what: str) -> Conflict:
    return Conflict(
        f"{what} {row['id']} is no longer at version {row['version']}: somebody else changed or "
        "removed it. Read it again."
    )
