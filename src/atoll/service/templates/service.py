"""
Create, replace, build and remove templates.

Replacing or rebuilding a template creates a new version. A session starts from the newest
version that is ready and keeps it; earlier versions stay as long as sessions need them. The inputs
of a version are fixed when it is created (`build_plan`); `builds` builds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Protocol

import structlog

from atoll.errors import AlreadyExists, Conflict, NotFound, TemporaryError, VersionConflict
from atoll.model.event import template_event
from atoll.model.session import SessionStatus
from atoll.model.template import (
    DEFAULT_TEMPLATE,
    Build,
    Template,
    TemplateStatus,
)
from atoll.service import cursors
from atoll.service.templates.build_plan import BuildPlanner, builds_same
from atoll.service.templates.limits import ResourceLimits

if TYPE_CHECKING:
    from atoll.drivers.base import Driver, RegistryAuth
    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.model.resources import Resources
    from atoll.service.events.service import Feed
    from atoll.service.replica import Replica
    from atoll.service.templates.build_inputs import BuildInputs
    from atoll.service.templates.build_logs import BuildLogs
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

CHANGED = "templates"
"""Topic on which a replica publishes that it has changed a template."""


class TemplateObserver(Protocol):
    def templates_changed(self) -> None:
        """
        A template was created, changed, built or removed, on any replica. The call must neither
        block nor raise.
        """


class Templates:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        build_inputs: BuildInputs,
        build_logs: BuildLogs,
        feed: Feed,
        settings: Settings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._driver = driver
        self.build_inputs = build_inputs
        self.build_logs = build_logs
        self._feed = feed
        self._settings = settings
        self._limits = ResourceLimits(self._store, self._clock, settings)
        self._planner = BuildPlanner(driver, self.ready)
        self._observers: list[TemplateObserver] = []
        self._known: dict[str, Template] = {}
        """Newest ready versions: each creation of a session needs one. Cleared at every change."""
        self._changes = 0

    def subscribe(self, observer: TemplateObserver) -> None:
        self._observers.append(observer)

    @property
    def base_resources(self) -> Resources:
        return self._limits.base

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
            with contextlib.suppress(AlreadyExists):  # Another replica that starts was faster.
                await self._store.templates.add(wanted, event=self._event(wanted, "created"))
        elif (found.default_resources, found.pool_size) != (
            wanted.default_resources,
            wanted.pool_size,
        ):
            # These fields follow the settings; the others cannot be changed.
            with contextlib.suppress(VersionConflict):
                wanted = dataclasses.replace(
                    wanted, created_at=found.created_at, number=found.number + 1
                )
                await self._store.templates.supersede(
                    found, wanted, event=self._event(wanted, "changed")
                )

    async def create(
        self, template: Template, *, credentials: RegistryAuth | None = None
    ) -> Template:
        template = await self._with_credentials(template, credentials, None)
        template = await self._planner.plan(template)
        await self._check(template)
        await self._store.templates.add(template, event=self._event(template, "created"))
        await self.publish_change()
        return template

    async def publish_change(self) -> None:
        """A template has changed: notify this replica and the others."""
        self.invalidate()
        self._feed.event_stored()
        try:
            await self._coordination.notify(CHANGED)
        except TemporaryError as error:
            # Each replica clears its cache when it is connected again.
            log.info("templates.not_published", error=error.message)

    def invalidate(self) -> None:
        """A template has changed: drop the cache and notify the observers."""
        self._changes += 1
        self._known.clear()
        self.notify()

    def notify(self) -> None:
        for observer in self._observers:
            observer.templates_changed()

    async def get(self, template_id: str) -> Template:
        """The newest version, ready or not."""
        found = await self._store.templates.get(template_id)
        if found is None:
            raise _not_found(template_id)
        return found

    async def ready(self, template_id: str) -> Template:
        """The version that a new session starts from."""
        known = self._known.get(template_id)
        if known is None:
            changes = self._changes
            known = await self._store.templates.ready(template_id)
            if known is None:
                raise _not_ready(await self.get(template_id))
            if changes == self._changes:  # Otherwise this may be from before the change.
                self._known[template_id] = known
        return known

    async def numbered(self, template_id: str, number: int) -> Template:
        known = self._known.get(template_id)
        if known is not None and known.number == number:
            return known
        found = await self._store.templates.numbered(template_id, number)
        if found is None:
            raise NotFound(
                f"Template {template_id} has no version {number}.", code="template_not_found"
            )
        return found

    async def versions(
        self, template_id: str, *, cursor: str | None, limit: int
    ) -> tuple[list[Template], str | None]:
        """Newest first; a cursor is the number of the last version that was returned."""
        newest = await self.get(template_id)
        if cursor is not None and (not cursor.isascii() or not cursor.isdigit()):
            raise cursors.bad_cursor()
        below = None if cursor is None else min(int(cursor), newest.number + 1)
        found = [newest] if below is None or below > newest.number else []
        if len(found) <= limit:
            found += await self._store.templates.before(
                template_id, number=below, limit=limit + 1 - len(found)
            )
        more = len(found) > limit
        return found[:limit], str(found[limit - 1].number) if more else None

    async def list(self, *, cursor: str | None, limit: int) -> Page[Template]:
        return await self._store.templates.page(cursor=cursor, limit=limit)

    async def replace(
        self, template: Template, *, credentials: RegistryAuth | None = None
    ) -> Template:
        """Set all fields, as a new version. Running sessions keep theirs."""
        old = await self.get(template.id)
        if template.id == DEFAULT_TEMPLATE:
            raise Conflict(
                f"Template {DEFAULT_TEMPLATE} is defined by the settings. Create another one.",
                code="template_built_in",
            )
        template = dataclasses.replace(template, created_at=old.created_at)
        template = await self._with_credentials(template, credentials, old)
        template = await self._planner.plan(template)
        if builds_same(old, template):
            template = dataclasses.replace(template, status=old.status, build=old.build)
        await self._check(template)
        return await self._supersede(old, template)

    async def build(self, template_id: str) -> Template:
        """Build it again as a new version, with the current packages of the index."""
        old = await self.get(template_id)
        if old.build is None:
            raise Conflict(
                f"Template {template_id} has no packages and no image to build.",
                code="template_not_built",
            )
        fresh = f"{old.id}/{old.created_at}/{old.number + 1}"
        template = await self._planner.plan(
            dataclasses.replace(old, updated_at=self._clock.now()), fresh=fresh
        )
        return await self._supersede(old, template)

    async def _supersede(self, old: Template, template: Template) -> Template:
        if not old.status.settled:
            # The replica that builds it fails to save its result.
            old = dataclasses.replace(
                old,
                status=TemplateStatus.FAILED,
                build=dataclasses.replace(
                    old.build or Build(), message=f"Superseded by version {old.number + 1}."
                ),
            )
        numbered = dataclasses.replace(template, number=old.number + 1)
        template = await self._store.templates.supersede(
            old, template, event=self._event(numbered, "changed")
        )
        await self.publish_change()
        return template

    async def _with_credentials(
        self, template: Template, credentials: RegistryAuth | None, old: Template | None
    ) -> Template:
        """The template with encrypted registry credentials; checks its build context."""
        await self.build_inputs.check(template)
        before = None if old is None else old.registry
        registry = await self.build_inputs.seal_credentials(template, credentials, before)
        return dataclasses.replace(template, registry=registry)

    async def remove(self, template_id: str) -> None:
        if template_id == DEFAULT_TEMPLATE:
            raise Conflict(f"Template {template_id} cannot be removed.", code="template_built_in")
        for status in (SessionStatus.CREATING, SessionStatus.RUNNING):
            page = await self._store.sessions.page(status=status, template_id=template_id, limit=1)
            if page.items:
                # A replacement of its instance would need the template.
                raise Conflict(
                    f"Template {template_id} is used by session {page.items[0].id}; end it first.",
                    code="template_in_use",
                )
        event = self._event(await self.get(template_id), "removed")
        if not await self._store.templates.remove(template_id, event=event):
            raise _not_found(template_id)
        await self.publish_change()
        try:
            await self.build_logs.forget(template_id)
        except TemporaryError as error:
            log.warning("template.log_left", template_id=template_id, error=error.message)

    def _event(self, template: Template, what: str) -> Event:
        return template_event(template, what, self._clock.now())

    async def _check(self, template: Template) -> None:
        self._limits.check_pool(template)
        await self.check_resources(template.default_resources)
        await self._driver.check(template)

    async def check_resources(self, resources: Resources) -> None:
        """Refuse resources beyond the settings, or beyond the largest node."""
        await self._limits.check(resources)


def _not_found(template_id: str) -> NotFound:
    return NotFound(f"There is no template {template_id}.", code="template_not_found")


def _not_ready(template: Template) -> Conflict:
    why = template.build.message if template.build is not None else None
    words = f"Template {template.id} is not ready: its build is {template.status}."
    return Conflict(
        f"{words} {why}" if why else words,
        code="template_not_ready",
        template_status=template.status.value,
    )
