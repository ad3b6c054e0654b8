"""
What the stores of all nouns have in common: rows of one table as entities.

The store of a noun inherits this and adds its own methods. Those with an underscore are for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from atoll.stores.sql.events import add_event, insert_of
from atoll.stores.sql.mapper import E, Mapper, Values
from atoll.stores.sql.paging import Query, page_of
from atoll.stores.sql.writes import Change, compare_and_set_again, was_inserted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Operation


class Records(Generic[E]):
    mapper: Mapper[E]
    noun: str
    """What error messages call an entity."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._insert = self.mapper.insert
        self._select = self.mapper.select
        self._update = self.mapper.update(self.mapper.columns)
        self._delete = f"DELETE FROM {self.mapper.table.name} WHERE id = :id"  # noqa: S608

    async def add(self, entity: E, *, event: Event | None = None) -> None:
        await self._add(entity, event, None)

    async def get(self, entity_id: str) -> E | None:
        return await self._find(self._select, {"id": entity_id})

    async def save(self, entity: E, *, event: Event | None = None) -> E:
        return await self._save(entity, event, None)

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[E]:
        return await self._page(cursor, limit)

    async def _add(self, entity: E, event: Event | None, first: Operation[object] | None) -> None:
        """
        Insert an entity, and the event if one is given. `first` runs in the same transaction, which
        is then not repeated when its outcome is not known.
        """
        row = self.mapper.row(entity)
        change = self._change(self._insert, row, event)

        def again(connection: Connection) -> None:
            if not was_inserted(connection, self._select, row, self.noun):
                change(connection)

        await self._write(change, again, first)

    async def _save(self, entity: E, event: Event | None, first: Operation[object] | None) -> E:
        """Compare-and-set of all columns; `event` and `first` as in `_add`."""
        return await self._set(self._update, entity, self.mapper.row(entity), event, first)

    async def _set(
        self,
        statement: str,
        entity: E,
        row: Values,
        event: Event | None = None,
        first: Operation[object] | None = None,
    ) -> E:
        """Compare-and-set of some columns, by a statement of `Mapper.update`."""

        def again(connection: Connection) -> None:
            if compare_and_set_again(connection, statement, self._select, row, self.noun):
                add_event(connection, event)

        await self._write(self._change(statement, row, event), again, first)
        return replace(entity, version=row["version"] + 1)

    def _change(self, statement: str, row: Values, event: Event | None) -> Change:
        return Change(statement, row, self.noun, None if event is None else insert_of(event))

    async def _write(
        self, change: Change, again: Operation[None], first: Operation[object] | None
    ) -> None:
        if first is None:
            await self._engine.write(change, again=again)
            return

        def both(connection: Connection) -> None:
            first(connection)
            change(connection)

        await self._engine.write(both)

    async def _find(self, statement: str, values: Mapping[str, Any]) -> E | None:
        def read(connection: Connection) -> E | None:
            row = connection.execute(statement, values).fetchone()
            return None if row is None else self.mapper.entity(row)

        return await self._engine.read(read)

    async def _list(self, statement: str, values: Mapping[str, Any] | None = None) -> list[E]:
        entity = self.mapper.entity
        return await self._engine.read(
            lambda connection: [entity(row) for row in connection.execute(statement, values or {})]
        )

    async def _remove(self, entity_id: str, *, repeat: bool = False) -> bool:
        """
        Whether it existed. With `repeat`, repeated when the outcome is not known: the entity is
        then gone, but a false answer means nothing.
        """

        def write(connection: Connection) -> bool:
            return connection.execute(self._delete, {"id": entity_id}).rowcount > 0

        return await self._engine.write(write, again=write if repeat else None)

    async def _page(
        self, cursor: str | None, limit: int, where: Mapping[str, str | None] | None = None
    ) -> Page[E]:
        query = Query(self.mapper.table.name, where or {}, self._engine.rows_at_once)
        return await self._engine.read(page_of(query, self.mapper.entity, cursor, limit))
