"""Between fields and columns, and the two kinds of write that can be refused."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Mapping

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_EXISTS = (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)

encode = json.JSONEncoder(separators=(",", ":")).encode
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


def insert(
    connection: sqlite3.Connection, statement: str, row: Mapping[str, object], what: str
) -> None:
    try:
        connection.execute(statement, row)
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode not in _EXISTS:
            raise
        raise Conflict(f"{what} {row['id']} exists already.") from error


def compare_and_set(
    connection: sqlite3.Connection, statement: str, row: Mapping[str, object], what: str
) -> None:
    """Run an update that names `id` and `version`; `row` holds the version that was read."""
    if connection.execute(statement, row).rowcount == 0:
        raise Conflict(
            f"{what} {row['id']} is no longer at version {row['version']}: somebody else changed "
            "or removed it. Read it again."
        )
