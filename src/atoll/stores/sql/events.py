"""
Events, stored in the transaction of the change that they report, and numbered afterwards.

Row ids are assigned when rows are written, but rows become visible in another order: a reader that
has seen id 5 could miss 4, which is committed later. So readers go by `number`, which visible rows
get in one transaction at a time: it starts with an update of the counter's row, on which the others
wait. Numbers increase by one and have no gaps, whatever fails, and what is read at one moment is
only followed by greater numbers.

Rows with consecutive ids are numbered by one statement. Events expire in order of their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.model.event import Event, FeedPage, FeedRange
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.writes import find_or_insert, insert

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine
    from atoll.stores.sql.writes import Statement

SEARCH_LIMIT = 5000
"""Events that one call searches at most, whether they match or not."""

MAPPER = Mapper(Event, tables.EVENTS, columns={"at": "created_at"})
_INSERT = MAPPER.insert
_COUNTER = "events"
_UNNUMBERED = "SELECT id FROM events WHERE number IS NULL ORDER BY id LIMIT :limit"
_LOCK_COUNTER = "UPDATE properties SET value = value WHERE name = :id"
_ADD_COUNTER = "INSERT INTO properties (name, value) VALUES (:id, :value)"
_SELECT_COUNTER = "SELECT value FROM properties WHERE name = :id"
_SET_COUNTER = "UPDATE properties SET value = :value WHERE name = :id"
_NUMBER = """
    UPDATE events SET number = id + :offset
    WHERE id >= :first AND id <= :last AND number IS NULL
"""
_OLDEST = "SELECT min(number) AS number FROM events"
_OLDEST_ROWS = """
    SELECT number, created_at FROM events WHERE number IS NOT NULL ORDER BY number LIMIT :limit
"""
_EXPIRE = "DELETE FROM events WHERE number <= :number"


def add_event(connection: Connection, event: Event | None) -> None:
    """Inside the transaction of the change that the event reports, if there is one."""
    if event is not None:
        connection.execute(*insert_of(event))


def insert_of(event: Event) -> Statement:
    return _INSERT, MAPPER.row(event)


class SqlEvents:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def number(self, *, limit: int = 1000) -> int:
        unnumbered = await self._engine.read(
            lambda connection: connection.execute(_UNNUMBERED, {"limit": 1}).fetchone()
        )
        if unnumbered is None:
            return 0

        def write(connection: Connection) -> int:
            return _number(connection, limit)

        return await find_or_insert(self._engine, write)

    async def range(self) -> FeedRange:
        return await self._engine.read(_range)

    async def after(
        self,
        number: int,
        *,
        types: Sequence[str] = (),
        subject: str | None = None,
        limit: int = 100,
    ) -> FeedPage:
        where, values = _matching(types)
        statement = "SELECT * FROM events WHERE number > :after AND number <= :end"
        if subject is not None:
            statement += " AND subject = :subject"
            values["subject"] = subject
        statement += f"{where} ORDER BY number LIMIT :limit"

        def read(connection: Connection) -> FeedPage:
            last = _last_number(connection)
            end = min(number + SEARCH_LIMIT, last)
            bound = {**values, "after": number, "end": end, "limit": limit}
            found = tuple(MAPPER.entity(row) for row in connection.execute(statement, bound))
            if len(found) == limit:
                end = found[-1].number or end
            # Read after the events: what is gone now may have been gone when they were read.
            return FeedPage(found, max(end, number), _oldest(connection, last))

        return await self._engine.read(read)

    async def expire(self, before: datetime, *, limit: int) -> int:
        oldest_kept = micros(before)

        def write(connection: Connection) -> int:
            end, count = None, 0
            for row in connection.execute(_OLDEST_ROWS, {"limit": limit}).fetchall():
                if row["created_at"] >= oldest_kept:
                    break
                end, count = row["number"], count + 1
            if end is not None:
                connection.execute(_EXPIRE, {"number": end})
            return count

        return await self._engine.write(write, again=write)


def _number(connection: Connection, limit: int) -> int:
    """Returns how many were numbered. Concurrent calls wait at the first statement."""
    if connection.execute(_LOCK_COUNTER, {"id": _COUNTER}).rowcount == 0:
        insert(connection, _ADD_COUNTER, {"id": _COUNTER, "value": "0"}, "Property")
    number = _last_number(connection)
    rows = connection.execute(_UNNUMBERED, {"limit": limit}).fetchall()
    for first, last in _runs(row["id"] for row in rows):
        values = {"first": first, "last": last, "offset": number + 1 - first}
        connection.execute(_NUMBER, values)
        number += last + 1 - first
    if rows:
        connection.execute(_SET_COUNTER, {"id": _COUNTER, "value": str(number)})
    return len(rows)


def _last_number(connection: Connection) -> int:
    row = connection.execute(_SELECT_COUNTER, {"id": _COUNTER}).fetchone()
    return 0 if row is None else int(row["value"])


def _range(connection: Connection) -> FeedRange:
    # The last number first: events that are numbered in between must not seem to be gone.
    last = _last_number(connection)
    return FeedRange(_oldest(connection, last), last)


def _oldest(connection: Connection, last: int) -> int:
    row = connection.execute(_OLDEST).fetchone()
    return last + 1 if row is None or row["number"] is None else int(row["number"])


def _runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last of each run of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for id in ids:
        if runs and runs[-1][1] + 1 == id:
            runs[-1] = (runs[-1][0], id)
        else:
            runs.append((id, id))
    return runs


def _matching(types: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """SQL and values of the condition that the type matches one of these, if any are last."""
    values: dict[str, Any] = {}
    if not types or "*" in types:
        return "", values
    choices = []
    for place, pattern in enumerate(types):
        name = f"type{place}"
        if pattern.endswith(".*"):
            # All types with this prefix: "/" is the character after ".".
            choices.append(f"(type >= :{name} AND type < :{name}_end)")
            values[name], values[f"{name}_end"] = pattern[:-1], f"{pattern[:-2]}/"
        else:
            choices.append(f"type = :{name}")
            values[name] = pattern
    return f" AND ({' OR '.join(choices)})", values
