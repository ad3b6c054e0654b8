"""
Pages of a table, newest first.

A cursor names the last row that was seen, by its place in the order and not by a count, so rows
that come and go do not move it, and the index leads straight to where the next page starts.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import InvalidRequest
from atoll.model.page import Page

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping

    from atoll.stores.sql.calls import Operation

T = TypeVar("T")

PAGE_BYTES = 8 * 1024 * 1024
"""A page ends sooner than asked for where its rows are large: each holds what user code wrote."""


def page_of(
    table: str,
    *,
    where: Mapping[str, str | None],
    cursor: str | None,
    limit: int,
    entity: Callable[[sqlite3.Row], T],
) -> Operation[Page[T]]:
    """Reads one page of the rows whose columns have the values in `where`; None allows any."""
    if limit < 1:
        raise InvalidRequest(f"limit: {limit} is not a number of items; it is 1 or more.")
    values: dict[str, object] = {
        name: str(value) for name, value in where.items() if value is not None
    }
    conditions = [f"{name} = :{name}" for name in values]
    if cursor is not None:
        values["after_time"], values["after_id"] = read_cursor(cursor)
        conditions.append("(created_at, id) < (:after_time, :after_id)")
    # One more than asked for tells whether there is a next page.
    values["limit"] = limit + 1
    statement = (
        f"SELECT * FROM {table} "  # noqa: S608 names of ours, values are bound
        + (f"WHERE {' AND '.join(conditions)} " if conditions else "")
        + "ORDER BY created_at DESC, id DESC LIMIT :limit"
    )

    def read(connection: sqlite3.Connection) -> Page[T]:
        rows: list[sqlite3.Row] = []
        size, more = 0, False
        for row in connection.execute(statement, values):
            size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
            more = len(rows) == limit or (size > PAGE_BYTES and bool(rows))
            if more:
                break
            rows.append(row)
        return Page(
            tuple(entity(row) for row in rows),
            make_cursor(rows[-1]["created_at"], rows[-1]["id"]) if more else None,
        )

    return read


def make_cursor(created_at: int, id: str) -> str:
    text = json.dumps([created_at, id], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[int, str]:
    try:
        created_at, id = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not (type(created_at) is int and type(id) is str and -(2**63) <= created_at < 2**63):
            raise ValueError("not a time and an id")
        id.encode()
        # Decoding forgives much; what we make has one spelling.
        if make_cursor(created_at, id) != cursor:
            raise ValueError("not the spelling that we make")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            "cursor: this was not returned by an earlier page; start again without one.",
            code="bad_cursor",
        ) from error
    return created_at, id
