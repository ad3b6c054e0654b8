"""
What changed, written in the same transaction as the change, and numbered afterwards.

The ids of rows are given when they are written, and rows become visible in another order: who read
up to one could miss another that has a lower id and comes later. So readers go by `number`, which
rows get once they are there, in one transaction at a time: it begins with an update of the counter,
a row on which all others wait. Numbers grow by one and have no gaps, whatever fails; what is read
at one moment is followed only by higher ones.

Rows whose ids follow each other are numbered by one statement. What expires is always what has the
lowest numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.model.event import Event, FeedPage, FeedRange
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.writes import insert

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine

SPAN = 5000
"""Events that one look goes through at most, whether they match or not."""

MAPPER = Mapper(Event, tables.EVENTS, columns={"at": "created_at"})
_COUNTER = "events"
_WAITING = "SELECT id FROM events WHERE number IS NULL ORDER BY id LIMIT :limit"
_LOCK = "UPDATE properties SET value = value WHERE name = :id"
_FIRST = "INSERT INTO properties (name, value) VALUES (:id, :value)"
_GIVEN = "SELECT value FROM properties WHERE name = :id"
_GIVE = "UPDATE properties SET value = :value WHERE name = :id"
_NUMBER = """
    UPDATE events SET number = id + :offset
    WHERE id >= :first AND id <= :last AND number IS NULL
"""
_OLDEST = "SELECT min(number) AS number FROM events"
_OLD = """
    SELECT number, created_at FROM events WHERE number IS NOT NULL ORDER BY number LIMIT :limit
"""
_EXPIRE = "DELETE FROM events WHERE number <= :number"


def add_event(connection: Connection, event: Event | None) -> None:
    """Inside the transaction of the change that the event reports, if there is one."""
    if event is not None:
        connection.execute(MAPPER.insert, MAPPER.row(event))


class SqlEvents:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def number(self, *, limit: int = 1000) -> int:
        waiting = await self._engine.read(
            lambda connection: connection.execute(_WAITING, {"limit": 1}).fetchone()
        )
        if waiting is None:
            return 0

        def write(connection: Connection) -> int:
            return _number(connection, limit)

        try:
            return await self._engine.write(write, again=write)
        except Conflict:
            # Another replica made the counter at the same time.
            return await self._engine.write(write, again=write)

    async def range(self) -> FeedRange:
        return await self._engine.read(_bounds)

    async def after(
        self,
        number: int,
        *,
        types: Sequence[str] = (),
        subject: str | None = None,
        limit: int = 100,
    ) -> FeedPage:
        where, values = _matching(types)
        statement = "SELECT * FROM events WHERE number > :after AND number <= :upto"
        if subject is not None:
            statement += " AND subject = :subject"
            values["subject"] = subject
        statement += f"{where} ORDER BY number LIMIT :limit"

        def read(connection: Connection) -> FeedPage:
            last = _given(connection)
            upto = min(number + SPAN, last)
            asked = {**values, "after": number, "upto": upto, "limit": limit}
            found = tuple(MAPPER.entity(row) for row in connection.execute(statement, asked))
            if len(found) == limit:
                upto = found[-1].number or upto
            # After the events: what is gone by now may have been gone when they were read.
            return FeedPage(found, max(upto, number), _oldest(connection, last))

        return await self._engine.read(read)

    async def expire(self, before: datetime, *, limit: int) -> int:
        moment_before = micros(before)

        def write(connection: Connection) -> int:
            upto, count = None, 0
            for row in connection.execute(_OLD, {"limit": limit}).fetchall():
                if row["created_at"] >= moment_before:
                    break
                upto, count = row["number"], count + 1
            if upto is not None:
                connection.execute(_EXPIRE, {"number": upto})
            return count

        return await self._engine.write(write, again=write)


def _number(connection: Connection, limit: int) -> int:
    """How many were numbered. Whoever does the same meanwhile waits at the first statement."""
    if connection.execute(_LOCK, {"id": _COUNTER}).rowcount == 0:
        insert(connection, _FIRST, {"id": _COUNTER, "value": "0"}, "Property")
    given = _given(connection)
    rows = connection.execute(_WAITING, {"limit": limit}).fetchall()
    number = given
    for first, last in _runs(row["id"] for row in rows):
        values = {"first": first, "last": last, "offset": number + 1 - first}
        connection.execute(_NUMBER, values)
        number += last + 1 - first
    if rows:
        connection.execute(_GIVE, {"id": _COUNTER, "value": str(number)})
    return len(rows)


def _given(connection: Connection) -> int:
    row = connection.execute(_GIVEN, {"id": _COUNTER}).fetchone()
    return 0 if row is None else int(row["value"])


def _bounds(connection: Connection) -> FeedRange:
    # The last one first: what is numbered in between must not seem to be gone.
    last = _given(connection)
    return FeedRange(_oldest(connection, last), last)


def _oldest(connection: Connection, last: int) -> int:
    row = connection.execute(_OLDEST).fetchone()
    return last + 1 if row is None or row["number"] is None else int(row["number"])


def _runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last of each row of ids that follow each other."""
    runs: list[tuple[int, int]] = []
    for one in ids:
        if runs and runs[-1][1] + 1 == one:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return runs


def _matching(types: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The condition that a row's type is one of these, if any are given."""
    values: dict[str, Any] = {}
    if not types or "*" in types:
        return "", values
    choices = []
    for place, pattern in enumerate(types):
        name = f"type{place}"
        if pattern.endswith(".*"):
            # Whatever begins like this: "/" comes right after ".".
            choices.append(f"(type >= :{name} AND type < :{name}_end)")
            values[name], values[f"{name}_end"] = pattern[:-1], f"{pattern[:-2]}/"
        else:
            choices.append(f"type = :{name}")
            values[name] = pattern
    return f" AND ({' OR '.join(choices)})", values
