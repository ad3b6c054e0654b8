"""Templates: what sessions start from."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, InvalidRequest, NotFound, TemporaryError
from atoll.model.resources import Resources, format_cpu, format_size
from atoll.model.session import SessionStatus
from atoll.model.template import DEFAULT_TEMPLATE, Template

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.drivers.base import Driver
    from atoll.model.page import Page
    from atoll.settings import Settings
    from atoll.stores.base import Store


log = structlog.get_logger(__name__)

CHANGED = "templates"
"""What a replica that changed one tells the others."""


class Templates:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        coordination: Coordination,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._store = store
        self._coordination = coordination
        self._driver = driver
        self._clock = clock
        self._settings = settings
        self._known: dict[str, Template] = {}
        """Read at every creation of a session; forgotten when any replica changes one."""
        self._changes = 0
        self.changed: Callable[[], None] = lambda: None
        """Told when a template was made, changed or removed."""

    @property
    def base_resources(self) -> Resources:
        base = self._settings.session
        return Resources(base.cpu, base.memory, base.disk, base.max_processes)

    async def ensure_default(self) -> None:
        found = await self._store.templates.get(DEFAULT_TEMPLATE)
        now = self._clock.now()
        wanted = Template(
            id=DEFAULT_TEMPLATE,
            name="Python of this machine",
            created_at=now,
            updated_at=now,
            default_resources=self.base_resources,
            pool_size=self._settings.pool.size,
        )
        if found is None:
            with contextlib.suppress(Conflict):  # Another replica, which starts as well.
                await self._store.templates.add(wanted)
        elif (found.default_resources, found.pool_size) != (
            wanted.default_resources,
            wanted.pool_size,
        ):
            # Its numbers are settings; the rest of it nobody can change.
            with contextlib.suppress(Conflict):
                await self._store.templates.save(
                    dataclasses.replace(wanted, created_at=found.created_at, version=found.version)
                )

    async def create(self, template: Template) -> Template:
        await self._check(template)
        await self._store.templates.add(template)
        await self._tell()
        return template

    async def _tell(self) -> None:
        self.forget()
        try:
            await self._coordination.tell(CHANGED)
        except TemporaryError as error:
            # They forget what they know when they hear of the back-end again.
            log.info("templates.not_told", error=error.message)

    def forget(self) -> None:
        """Read what is needed anew: something was changed."""
        self._changes += 1
        self._known.clear()
        self.changed()

    async def get(self, template_id: str) -> Template:
        known = self._known.get(template_id)
        if known is None:
            changes = self._changes
            known = await self._store.templates.get(template_id)
            if known is None:
                raise NotFound(f"No template is named {template_id}.", code="template_not_found")
            if changes == self._changes:  # Else what was read may be of before the change.
                self._known[template_id] = known
        return known

    async def list(self, *, cursor: str | None, limit: int) -> Page[Template]:
        return await self._store.templates.page(cursor=cursor, limit=limit)

    async def replace(self, template: Template) -> Template:
        """PUT: all fields anew. Sessions that run keep what they started with."""
        old = await self.get(template.id)
        if template.id == DEFAULT_TEMPLATE:
            raise Conflict(
                f"Template {DEFAULT_TEMPLATE} is set by the server's settings; create another one.",
                code="template_built_in",
            )
        template = dataclasses.replace(template, created_at=old.created_at, version=old.version)
        await self._check(template)
        template = await self._store.templates.save(template)
        await self._tell()
        return template

    async def remove(self, template_id: str) -> None:
        if template_id == DEFAULT_TEMPLATE:
            raise Conflict(f"Template {template_id} cannot be removed.", code="template_built_in")
        for status in (SessionStatus.CREATING, SessionStatus.RUNNING):
            page = await self._store.sessions.page(status=status, template_id=template_id, limit=1)
            if page.items:
                # Its instance may have to be made again.
                raise Conflict(
                    f"Template {template_id} is used by session {page.items[0].id}; end it first.",
                    code="template_in_use",
                )
        if not await self._store.templates.remove(template_id):
            raise NotFound(f"No template is named {template_id}.", code="template_not_found")
        await self._tell()

    async def _check(self, template: Template) -> None:
        if template.pool_size > self._settings.pool.max_size:
            raise InvalidRequest(
                f"pool_size: at most {self._settings.pool.max_size} are allowed here.",
                field="pool_size",
            )
        self.check_resources(template.default_resources)
        await self._driver.check(template)

    def check_resources(self, resources: Resources) -> None:
        most = self._settings.session
        for field, value, limit in (
            ("cpu", resources.cpu, most.max_cpu),
            ("memory", resources.memory, most.max_memory),
            ("disk", resources.disk, most.max_disk),
        ):
            if value > limit:
                shown = format_cpu(value) if field == "cpu" else format_size(int(value))
                most_shown = format_cpu(limit) if field == "cpu" else format_size(int(limit))
                raise InvalidRequest(
                    f"{field}: {shown} is more than the {most_shown} allowed here.", field=field
                )
        if resources.memory < 16 * 2**20:
            raise InvalidRequest(
                "memory: less than 16Mi cannot hold an interpreter.", field="memory"
            )
        if resources.disk < 4 * 2**20:
            raise InvalidRequest("disk: less than 4Mi cannot hold a file system.", field="disk")
