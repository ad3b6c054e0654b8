"""
Pages of a table, newest first.

A cursor identifies the last row of a page by its position in the order, not by a count. Rows that
are added or removed do not move it, and the index leads directly to the start of the next page.
"""

from __future__ import annotations

import base64
import heapq
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import InvalidRequest
from atoll.model.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from atoll.stores.sql.engine import Connection, Operation, Row

T = TypeVar("T")

PAGE_BYTES = 8 * 1024 * 1024
"""A page ends early if its rows are large: they contain what user code wrote."""

INDEXES_OF_TWO = {"executions_session_status"}


@dataclass(frozen=True, slots=True)
class Query:
    table: str
    where: Mapping[str, str | None]
    """The values that columns have; None allows any."""
    rows_at_once: int | None = None
    """How many rows to ask the database for at a time, where it does not return them one by one."""
    statuses: Sequence[str] = ()
    """If not empty, rows have one of these as well."""


def page_of(
    query: Query, entity: Callable[[Row], T], cursor: str | None, limit: int
) -> Operation[Page[T]]:
    """Reads one page of rows, made into entities."""
    if limit < 1:
        raise InvalidRequest(f"limit: must be 1 or more, not {limit}.")
    values: dict[str, object] = {
        name: str(value) for name, value in query.where.items() if value is not None
    }
    order = _order(tuple(values))
    # One list per status, each from an index: a single list of all would have to be sorted.
    lists = [{**values, "status": str(status)} for status in query.statuses] or [values]
    start = None if cursor is None else read_cursor(cursor)

    def read(connection: Connection) -> Page[T]:
        rows: list[Row] = []
        size, more = 0, False
        # One row more than asked for shows whether there is a next page.
        for row in heapq.merge(
            *(_rows(connection, query, where, start, limit + 1) for where in lists),
            key=lambda row: (row[order], row["id"]),
            reverse=True,
        ):
            size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
            more = len(rows) == limit or (size > PAGE_BYTES and bool(rows))
            if more:
                break
            rows.append(row)
        return Page(
            tuple(entity(row) for row in rows),
            make_cursor(rows[-1][order], rows[-1]["id"]) if more else None,
        )

    return read


def _rows(
    connection: Connection,
    query: Query,
    where: Mapping[str, object],
    start: tuple[int, str] | None,
    limit: int,
) -> Iterator[Row]:
    """At most `limit` rows beyond `start`, fetched as they are needed."""
    columns = tuple(where)
    order = _order(columns)
    while limit > 0:
        ask = min(limit, query.rows_at_once or limit)
        values = {**where, "limit": ask}
        if start is not None:
            values["after_time"], values["after_id"] = start
        row, got = None, 0
        for row in connection.execute(statement(query.table, columns, start is not None), values):
            got += 1
            yield row
        if row is None or got < ask:
            return
        start = row[order], row["id"]
        limit -= got


def _order(columns: tuple[str, ...]) -> str:
    """
    The column that a list is ordered by. Executions of an invocation are ordered by number, because
    the clocks of the replicas that created them may differ.
    """
    return "ordinal" if "invocation_id" in columns else "created_at"


@lru_cache
def statement(table: str, columns: tuple[str, ...], continued: bool) -> str:
    """Table and columns are constants, values are bound. Indexes are named after their columns."""
    names = [name.removesuffix("_id") for name in columns] or ["created"]
    index = "_".join((table, *names))
    if len(names) > 1 and index not in INDEXES_OF_TWO:
        index = f"{table}_{names[0]}"
    conditions = [f"{name} = :{name}" for name in columns[:2]]
    # So that SQLite does not prefer an index on two columns to the one on the first, which leads to
    # fewer rows.
    conditions += [f"coalesce({name}, '') = :{name}" for name in columns[2:]]
    order = _order(columns)
    if continued and order == "ordinal":
        conditions.append("ordinal < :after_time")
    elif continued:
        # Not `(created_at, id) < (…)`, for which MariaDB does not use an index.
        conditions.append("created_at <= :after_time")
        conditions.append("(created_at < :after_time OR id < :after_id)")
    return (
        # A comment except on MariaDB, which would otherwise look up the first column and then read
        # the rows of all previous pages.
        f"SELECT * FROM {table} /*! FORCE INDEX ({index}) */ "  # noqa: S608
        + (f"WHERE {' AND '.join(conditions)} " if conditions else "")
        + f"ORDER BY {'ordinal DESC' if order == 'ordinal' else 'created_at DESC, id DESC'} "
        + "LIMIT :limit"
    )


def make_cursor(created_at: int, id: str) -> str:
    text = json.dumps([created_at, id], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[int, str]:
    try:
        created_at, id = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not (type(created_at) is int and type(id) is str and -(2**63) <= created_at < 2**63):
            raise ValueError("not a time and an id")
        id.encode()
        # Decoding is lenient; the cursors that we make have one spelling.
        if make_cursor(created_at, id) != cursor:
            raise ValueError("not the spelling that we make")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            "cursor: not returned by an earlier page. Start again without a cursor.",
            code="bad_cursor",
        ) from error
    return created_at, id
