"""
Templates and the versions that they had before.

`add`, `save` and `drop` may be repeated. `remove` may not: a second one would say that nothing was
there. Nor may `supersede`, which is several statements.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from atoll.model.image import ImageInfo, Registry
from atoll.model.resources import Resources
from atoll.model.template import Build, Layer, Template, TemplateStatus
from atoll.stores.sql.events import tell
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    decode,
    encode,
    insert,
    inserted,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO templates (
        id, version, created_at, updated_at, cpu, memory, disk, max_processes, pool_size, name,
        image, base_image, pre_installed_packages, requirements, python, preload, env,
        number, status, build, pool_max, runtime, dockerfile, build_context, registry
    ) VALUES (
        :id, :version, :created_at, :updated_at, :cpu, :memory, :disk, :max_processes, :pool_size,
        :name, :image, :base_image, :pre_installed_packages, :requirements, :python, :preload, :env,
        :number, :status, :build, :pool_max, :runtime, :dockerfile, :build_context, :registry
    )
"""
_GET = "SELECT * FROM templates WHERE id = :id"
_SAVE = """
    UPDATE templates SET
        created_at = :created_at, updated_at = :updated_at, cpu = :cpu, memory = :memory,
        disk = :disk, max_processes = :max_processes, pool_size = :pool_size, name = :name,
        image = :image, base_image = :base_image, pre_installed_packages = :pre_installed_packages,
        requirements = :requirements, python = :python, preload = :preload, env = :env,
        number = :number, status = :status, build = :build, pool_max = :pool_max,
        runtime = :runtime, dockerfile = :dockerfile, build_context = :build_context,
        registry = :registry, version = :version + 1
    WHERE id = :id AND version = :version
"""
_REMOVE = "DELETE FROM templates WHERE id = :id"
_REMOVE_VERSIONS = "DELETE FROM template_versions WHERE template_id = :id"
_KEEP = """
    INSERT INTO template_versions (template_id, number, status, template)
    VALUES (:template_id, :number, :status, :template)
"""
_NUMBERED = "SELECT * FROM template_versions WHERE template_id = :id AND number = :number"
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
_LARGEST = 2**31 - 1
_LATER = dict.fromkeys(("pool_max", "runtime", "dockerfile", "build_context", "registry"))
"""Columns that there were not always."""


class SqlTemplates:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, template: Template, *, event: Event | None = None) -> None:
        row = _row(template)

        def write(connection: Connection) -> None:
            insert(connection, _ADD, row, "Template")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if not inserted(connection, _GET, row, "Template"):
                write(connection)

        await self._engine.write(write, again=again)

    async def get(self, template_id: str) -> Template | None:
        def read(connection: Connection) -> Template | None:
            row = connection.execute(_GET, {"id": template_id}).fetchone()
            return None if row is None else _template(row)

        return await self._engine.read(read)

    async def save(self, template: Template, *, event: Event | None = None) -> Template:
        row = _row(template)

        def write(connection: Connection) -> None:
            compare_and_set(connection, _SAVE, row, "Template")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if compare_and_set_again(connection, _SAVE, _GET, row, "Template"):
                tell(connection, event)

        await self._engine.write(write, again=again)
        return replace(template, version=template.version + 1)

    async def supersede(
        self, before: Template, template: Template, *, event: Event | None = None
    ) -> Template:
        row = _row(replace(template, number=before.number + 1, version=before.version))
        kept = {
            "template_id": before.id,
            "number": before.number,
            "status": before.status,
            "template": encode(_row(before)),
        }

        def write(connection: Connection) -> None:
            compare_and_set(connection, _SAVE, row, "Template")
            connection.execute(_KEEP, kept)
            tell(connection, event)

        await self._engine.write(write)
        return replace(template, number=before.number + 1, version=before.version + 1)

    async def numbered(self, template_id: str, number: int) -> Template | None:
        values = {"id": template_id, "number": number}

        def read(connection: Connection) -> Template | None:
            newest = connection.execute(_GET, values).fetchone()
            if newest is not None and newest["number"] == number:
                return _template(newest)
            row = connection.execute(_NUMBERED, values).fetchone()
            return None if row is None else _kept(row)

        return await self._engine.read(read)

    async def ready(self, template_id: str) -> Template | None:
        def read(connection: Connection) -> Template | None:
            newest = connection.execute(_GET, {"id": template_id}).fetchone()
            if newest is None or newest["status"] == TemplateStatus.READY:
                return None if newest is None else _template(newest)
            row = connection.execute(_READY, {"id": template_id}).fetchone()
            return None if row is None else _kept(row)

        return await self._engine.read(read)

    async def before(
        self, template_id: str, *, number: int | None = None, limit: int = 50
    ) -> list[Template]:
        below = _LARGEST if number is None else number
        values = {"id": template_id, "number": below, "limit": limit}
        return await self._engine.read(
            lambda connection: [_kept(row) for row in connection.execute(_BEFORE, values)]
        )

    async def drop(self, template_id: str, number: int) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_DROP, {"id": template_id, "number": number})

        await self._engine.write(write, again=write)

    async def unbuilt(self, *, limit: int, after: str = "") -> list[Template]:
        values = {"after": after, "limit": limit}
        return await self._engine.read(
            lambda connection: [_template(row) for row in connection.execute(_UNBUILT, values)]
        )

    async def remove(self, template_id: str, *, event: Event | None = None) -> bool:
        def write(connection: Connection) -> bool:
            connection.execute(_REMOVE_VERSIONS, {"id": template_id})
            there = connection.execute(_REMOVE, {"id": template_id}).rowcount > 0
            tell(connection, event if there else None)
            return there

        return await self._engine.write(write)

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
        "pool_max": template.pool_max,
        "name": encode(template.name),
        "image": encode(template.image),
        "base_image": encode(template.base_image),
        # Not used any more; earlier versions, which may run beside this one, read it.
        "pre_installed_packages": encode(()),
        "requirements": encode(template.require),
        "python": encode(template.python),
        "preload": encode(template.preload),
        "env": encode(template.env),
        "number": template.number,
        "status": str(template.status),
        "build": None if template.build is None else encode(_build_fields(template.build)),
        "runtime": template.runtime or None,
        "dockerfile": encode(template.dockerfile) if template.dockerfile else None,
        "build_context": template.build_context,
        "registry": None if template.registry is None else encode(asdict(template.registry)),
    }


def _build_fields(build: Build) -> dict[str, Any]:
    return {**asdict(build), "retry_at": optional_micros(build.retry_at)}


def _build(fields: dict[str, Any]) -> Build:
    layers = [
        Layer(layer["name"], tuple(layer["packages"]), layer.get("image", False))
        for layer in fields["layers"]
    ]
    image = fields.get("image")
    return Build(
        **{
            **fields,
            "debian_packages": tuple(fields["debian_packages"]),
            "python_packages": tuple(fields["python_packages"]),
            "layers": tuple(layers),
            "installed": tuple(fields["installed"]),
            "retry_at": optional_moment(fields["retry_at"]),
            "image": None if image is None else _image(image),
        }
    )


def _image(fields: dict[str, Any]) -> ImageInfo:
    return ImageInfo(fields["digest"], tuple(fields["entrypoint"]), tuple(fields["command"]))


def _kept(row: Row) -> Template:
    # One that was written before there was such a column lacks it.
    return _template({**_LATER, **decode(row["template"])})


def _template(row: Row) -> Template:
    return Template(
        id=row["id"],
        name=decode(row["name"]),
        created_at=moment(row["created_at"]),
        updated_at=moment(row["updated_at"]),
        default_resources=Resources(row["cpu"], row["memory"], row["disk"], row["max_processes"]),
        image=decode(row["image"]),
        base_image=decode(row["base_image"]),
        require=tuple(decode(row["requirements"])),
        python=decode(row["python"]),
        preload=tuple(decode(row["preload"])),
        env=decode(row["env"]),
        pool_size=row["pool_size"],
        pool_max=row["pool_max"],
        number=row["number"],
        status=TemplateStatus(row["status"]),
        build=None if row["build"] is None else _build(decode(row["build"])),
        runtime=row["runtime"] or "",
        dockerfile="" if row["dockerfile"] is None else decode(row["dockerfile"]),
        build_context=row["build_context"],
        registry=None if row["registry"] is None else Registry(**decode(row["registry"])),
        version=row["version"],
    )
