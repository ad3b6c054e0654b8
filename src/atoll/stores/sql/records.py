"""What the stores of all nouns have in common: rows of one table as entities."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from atoll.stores.sql.events import add_event
from atoll.stores.sql.mapper import E, Mapper, Values
from atoll.stores.sql.paging import Query, page_of
from atoll.stores.sql.writes import (
    compare_and_set,
    compare_and_set_again,
    insert,
    was_inserted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Operation


class Records(Generic[E]):
    def __init__(self, engine: Engine, mapper: Mapper[E], noun: str) -> None:
        """`noun` is what error messages call an entity."""
        self._engine = engine
        self._mapper = mapper
        self._noun = noun
        self._insert = mapper.insert
        self._select = mapper.select
        self._update = mapper.update(mapper.columns)

    async def add(
        self, entity: E, *, event: Event | None = None, first: Operation[object] | None = None
    ) -> None:
        """
        Insert an entity, and the event if one is given. `first` runs in the same transaction, which
        is then not repeated when its outcome is not known.
        """
        row = self._mapper.row(entity)

        def write(connection: Connection) -> None:
            if first is not None:
                first(connection)
            insert(connection, self._insert, row, self._noun)
            add_event(connection, event)

        def again(connection: Connection) -> None:
            if not was_inserted(connection, self._select, row, self._noun):
                write(connection)

        await self._engine.write(write, again=again if first is None else None)

    async def get(self, entity_id: str) -> E | None:
        return await self.find(self._select, {"id": entity_id})

    async def save(
        self, entity: E, *, event: Event | None = None, first: Operation[object] | None = None
    ) -> E:
        """Compare-and-set of all columns; `event` and `first` as in `add`."""
        return await self.update(self._update, entity, self._mapper.row(entity), event, first)

    async def update(
        self,
        statement: str,
        entity: E,
        row: Values,
        event: Event | None = None,
        first: Operation[object] | None = None,
    ) -> E:
        """Compare-and-set of some columns, by a statement of `Mapper.update`."""

        def write(connection: Connection) -> None:
            if first is not None:
                first(connection)
            compare_and_set(connection, statement, row, self._noun)
            add_event(connection, event)

        def again(connection: Connection) -> None:
            if compare_and_set_again(connection, statement, self._select, row, self._noun):
                add_event(connection, event)

        await self._engine.write(write, again=again if first is None else None)
        return replace(entity, version=row["version"] + 1)

    async def find(self, statement: str, values: Mapping[str, Any]) -> E | None:
        def read(connection: Connection) -> E | None:
            row = connection.execute(statement, values).fetchone()
            return None if row is None else self._mapper.entity(row)

        return await self._engine.read(read)

    async def list(self, statement: str, values: Mapping[str, Any] | None = None) -> list[E]:
        entity = self._mapper.entity
        return await self._engine.read(
            lambda connection: [entity(row) for row in connection.execute(statement, values or {})]
        )

    async def page(
        self, *, cursor: str | None, limit: int, where: Mapping[str, str | None] | None = None
    ) -> Page[E]:
        query = Query(self._mapper.table.name, where or {}, self._engine.rows_at_once)
        return await self._engine.read(page_of(query, self._mapper.entity, cursor, limit))
