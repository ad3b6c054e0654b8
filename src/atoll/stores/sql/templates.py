"""
Templates and their previous versions.

`remove` is not repeatable: a second attempt would find nothing and report that. Nor is `supersede`,
which is several statements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.model.template import Template, TemplateStatus
from atoll.stores.sql import tables
from atoll.stores.sql.events import add_event
from atoll.stores.sql.json_codec import decode, encode
from atoll.stores.sql.mapper import Mapper, Special
from atoll.stores.sql.records import Records
from atoll.stores.sql.writes import compare_and_set

if TYPE_CHECKING:
    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection, Row

MAPPER = Mapper(
    Template,
    tables.TEMPLATES,
    columns={"require": "requirements"},
    special=Special(
        columns={"pre_installed_packages"},
        # No longer used. Replicas of earlier versions, which may run beside this one, read it.
        write=lambda _: {"pre_installed_packages": encode(())},
    ),
)
_SAVE = MAPPER.update(MAPPER.columns)
_REMOVE = "DELETE FROM templates WHERE id = :id"
_REMOVE_VERSIONS = "DELETE FROM template_versions WHERE template_id = :id"
_ADD_VERSION = """
    INSERT INTO template_versions (template_id, number, status, template)
    VALUES (:template_id, :number, :status, :template)
"""
_VERSION = "SELECT * FROM template_versions WHERE template_id = :id AND number = :number"
_READY = """
    SELECT * FROM template_versions WHERE template_id = :id AND status = 'ready'
    ORDER BY number DESC LIMIT 1
"""
_BEFORE = """
    SELECT * FROM template_versions WHERE template_id = :id AND number < :number
    ORDER BY number DESC LIMIT :limit
"""
_DROP = "DELETE FROM template_versions WHERE template_id = :id AND number = :number"
_UNBUILT = """
    SELECT * FROM templates WHERE status IN ('pending', 'building') AND id > :after
    ORDER BY id LIMIT :limit
"""
_MAX_NUMBER = 2**31 - 1
_NULLS = dict.fromkeys(MAPPER.columns)


class SqlTemplates(Records[Template]):
    mapper = MAPPER
    noun = "Template"

    async def supersede(
        self, before: Template, template: Template, *, event: Event | None = None
    ) -> Template:
        previous = {
            "template_id": before.id,
            "number": before.number,
            "status": before.status.value,
            "template": encode(MAPPER.row(before)),
        }
        following = replace(template, number=before.number + 1, version=before.version)
        row = MAPPER.row(following)

        def write(connection: Connection) -> None:
            compare_and_set(connection, _SAVE, row, "Template")
            connection.execute(_ADD_VERSION, previous)
            add_event(connection, event)

        await self._engine.write(write)
        return replace(following, version=before.version + 1)

    async def numbered(self, template_id: str, number: int) -> Template | None:
        values = {"id": template_id, "number": number}

        def read(connection: Connection) -> Template | None:
            newest = connection.execute(MAPPER.select, values).fetchone()
            if newest is not None and newest["number"] == number:
                return MAPPER.entity(newest)
            row = connection.execute(_VERSION, values).fetchone()
            return None if row is None else _version(row)

        return await self._engine.read(read)

    async def ready(self, template_id: str) -> Template | None:
        def read(connection: Connection) -> Template | None:
            newest = connection.execute(MAPPER.select, {"id": template_id}).fetchone()
            if newest is None or newest["status"] == TemplateStatus.READY:
                return None if newest is None else MAPPER.entity(newest)
            row = connection.execute(_READY, {"id": template_id}).fetchone()
            return None if row is None else _version(row)

        return await self._engine.read(read)

    async def before(
        self, template_id: str, *, number: int | None = None, limit: int = 50
    ) -> list[Template]:
        below = _MAX_NUMBER if number is None else number
        values = {"id": template_id, "number": below, "limit": limit}
        return await self._engine.read(
            lambda connection: [_version(row) for row in connection.execute(_BEFORE, values)]
        )

    async def drop(self, template_id: str, number: int) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_DROP, {"id": template_id, "number": number})

        await self._engine.write(write, again=write)

    async def unbuilt(self, *, limit: int, after: str = "") -> list[Template]:
        return await self._list(_UNBUILT, {"after": after, "limit": limit})

    async def remove(self, template_id: str, *, event: Event | None = None) -> bool:
        def write(connection: Connection) -> bool:
            connection.execute(_REMOVE_VERSIONS, {"id": template_id})
            removed = connection.execute(_REMOVE, {"id": template_id}).rowcount > 0
            add_event(connection, event if removed else None)
            return removed

        return await self._engine.write(write)


def _version(row: Row) -> Template:
    # A version that was written before there was a column lacks it.
    return MAPPER.entity({**_NULLS, **decode(row["template"])})
