"""
Templates.

`add` and `save` may be repeated. `remove` may not: a second one would say that nothing was there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.model.resources import Resources
from atoll.model.template import Template
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    decode,
    encode,
    insert,
    insert_again,
    micros,
    moment,
)

if TYPE_CHECKING:
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO templates (
        id, version, created_at, updated_at, cpu, memory, disk, max_processes, pool_size, name,
        image, base_image, pre_installed_packages, requirements, python, preload, env
    ) VALUES (
        :id, :version, :created_at, :updated_at, :cpu, :memory, :disk, :max_processes, :pool_size,
        :name, :image, :base_image, :pre_installed_packages, :requirements, :python, :preload, :env
    )
"""
_GET = "SELECT * FROM templates WHERE id = :id"
_SAVE = """
    UPDATE templates SET
        created_at = :created_at, updated_at = :updated_at, cpu = :cpu, memory = :memory,
        disk = :disk, max_processes = :max_processes, pool_size = :pool_size, name = :name,
        image = :image, base_image = :base_image, pre_installed_packages = :pre_installed_packages,
        requirements = :requirements, python = :python, preload = :preload, env = :env,
        version = :version + 1
    WHERE id = :id AND version = :version
"""
_REMOVE = "DELETE FROM templates WHERE id = :id"


class SqlTemplates:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, template: Template) -> None:
        row = _row(template)
        await self._engine.write(
            lambda connection: insert(connection, _ADD, row, "Template"),
            again=lambda connection: insert_again(connection, _ADD, _GET, row, "Template"),
        )

    async def get(self, template_id: str) -> Template | None:
        def read(connection: Connection) -> Template | None:
            row = connection.execute(_GET, {"id": template_id}).fetchone()
            return None if row is None else _template(row)

        return await self._engine.read(read)

    async def save(self, template: Template) -> Template:
        row = _row(template)
        await self._engine.write(
            lambda connection: compare_and_set(connection, _SAVE, row, "Template"),
            again=lambda connection: compare_and_set_again(
                connection, _SAVE, _GET, row, "Template"
            ),
        )
        return replace(template, version=template.version + 1)

    async def remove(self, template_id: str) -> bool:
        return await self._engine.write(
            lambda connection: connection.execute(_REMOVE, {"id": template_id}).rowcount > 0
        )

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Template]:
        return await self._engine.read(
            page_of(
                "templates",
                where={},
                cursor=cursor,
                limit=limit,
                entity=_template,
                rows_at_once=self._engine.rows_at_once,
            )
        )


def _row(template: Template) -> dict[str, Any]:
    return {
        "id": template.id,
        "version": template.version,
        "created_at": micros(template.created_at),
        "updated_at": micros(template.updated_at),
        "cpu": template.default_resources.cpu,
        "memory": template.default_resources.memory,
        "disk": template.default_resources.disk,
        "max_processes": template.default_resources.max_processes,
        "pool_size": template.pool_size,
        "name": encode(template.name),
        "image": encode(template.image),
        "base_image": encode(template.base_image),
        "pre_installed_packages": encode(template.pre_installed_packages),
        "requirements": encode(template.require),
        "python": encode(template.python),
        "preload": encode(template.preload),
        "env": encode(template.env),
    }


def _template(row: Row) -> Template:
    return Template(
        id=row["id"],
        name=decode(row["name"]),
        created_at=moment(row["created_at"]),
        updated_at=moment(row["updated_at"]),
        default_resources=Resources(row["cpu"], row["memory"], row["disk"], row["max_processes"]),
        image=decode(row["image"]),
        base_image=decode(row["base_image"]),
        pre_installed_packages=tuple(decode(row["pre_installed_packages"])),
        require=tuple(decode(row["requirements"])),
        python=decode(row["python"]),
        preload=tuple(decode(row["preload"])),
        env=decode(row["env"]),
        pool_size=row["pool_size"],
        version=row["version"],
    )
