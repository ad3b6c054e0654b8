"""Templates: what sessions start from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.sdk.decode import decode
from atoll.sdk.paths import segment
from atoll.sdk.values import TemplateInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.connection import Connection

_READ_ONLY = ("id", "version", "created_at", "updated_at")


class AsyncTemplates:
    """All templates of the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        name: str,
        *,
        template_id: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        packages: Sequence[str] | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
    ) -> TemplateInfo:
        """
        A new template.

        `image` is a root file system directory on the node, `python` the interpreter, `preload` the
        modules it has imported before code arrives, `pool_size` how many instances are kept ready,
        `require` what a node must be able to give.
        """
        body = {"name": name, "id": template_id}
        changes = _changes(image, base_image, packages, python, preload, env, pool_size, require)
        limits = _limits(cpu, memory, disk, max_processes)
        body |= changes | ({"default_resources": limits} if limits else {})
        given = {name: value for name, value in body.items() if value is not None}
        return decode(TemplateInfo, await self._connection.call("POST", "templates", body=given))

    async def get(self, template_id: str) -> TemplateInfo:
        answer = await self._connection.call("GET", f"templates/{segment(template_id)}")
        return decode(TemplateInfo, answer)

    async def list(self) -> AsyncIterator[TemplateInfo]:
        async for item in self._connection.pages("templates"):
            yield decode(TemplateInfo, item)

    async def update(
        self,
        template_id: str,
        *,
        name: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        packages: Sequence[str] | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
    ) -> TemplateInfo:
        """Change what is given and keep the rest; sessions that exist already are not touched."""
        path = f"templates/{segment(template_id)}"
        stored = await self._connection.call("GET", path)
        body = {key: value for key, value in stored.items() if key not in _READ_ONLY}
        changes = _changes(image, base_image, packages, python, preload, env, pool_size, require)
        body |= {key: value for key, value in changes.items() if value is not None}
        body["default_resources"] = {
            **stored["default_resources"],
            **_limits(cpu, memory, disk, max_processes),
        }
        body["name"] = stored["name"] if name is None else name
        return decode(TemplateInfo, await self._connection.call("PUT", path, body=body))

    async def delete(self, template_id: str) -> None:
        await self._connection.call("DELETE", f"templates/{segment(template_id)}")


def _changes(
    image: str | None,
    base_image: str | None,
    packages: Sequence[str] | None,
    python: str | None,
    preload: Sequence[str] | None,
    env: Mapping[str, str] | None,
    pool_size: int | None,
    require: Sequence[str] | None,
) -> dict[str, Any]:
    return {
        "image": image,
        "base_image": base_image,
        "pre_installed_packages": None if packages is None else list(packages),
        "python": python,
        "preload": None if preload is None else list(preload),
        "env": None if env is None else dict(env),
        "pool_size": pool_size,
        "security_context": None if require is None else {"require": list(require)},
    }


def _limits(
    cpu: str | float | None,
    memory: str | int | None,
    disk: str | int | None,
    max_processes: int | None,
) -> dict[str, Any]:
    limits = {
        "cpu": None if cpu is None else str(cpu),
        "memory": None if memory is None else str(memory),
        "disk": None if disk is None else str(disk),
        "max_processes": max_processes,
    }
    return {name: value for name, value in limits.items() if value is not None}
