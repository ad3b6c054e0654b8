"""
Templates: what sessions start from.

A template that is replaced, or built again, gets a new version. Sessions start from the newest one
that is ready and keep it for life; the versions before stay for them. What a version is built from
is settled when it is made, here; building it is the matter of `builds`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, InvalidRequest, NotFound, TemporaryError
from atoll.model import packages
from atoll.model.event import template_event
from atoll.model.resources import Resources, format_cpu, format_size
from atoll.model.session import SessionStatus
from atoll.model.template import (
    BASE_TEMPLATE,
    DEFAULT_TEMPLATE,
    Build,
    Layer,
    Template,
    TemplateStatus,
)
from atoll.service import cursors
from atoll.service.packages.environments import require_packages
from atoll.service.templates.node_limits import NodeLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.drivers.base import Driver, RegistryAuth
    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.service.events.service import Feed
    from atoll.service.replica import Replica
    from atoll.service.templates.build_inputs import BuildInputs
    from atoll.service.templates.build_logs import BuildLogs
    from atoll.service.templates.observers import TemplateObserver
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

CHANGED = "templates"
"""What a replica that changed one tells the others."""


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
        self._node_limits = NodeLimits(self._store, self._clock, self.base_resources)
        self._observers: list[TemplateObserver] = []
        self._known: dict[str, Template] = {}
        """
        The newest that are ready: read at every creation of a session, and forgotten when any
        replica changes one.
        """
        self._changes = 0

    def subscribe(self, observer: TemplateObserver) -> None:
        self._observers.append(observer)

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
                await self._store.templates.add(wanted, event=self._event(wanted, "created"))
        elif (found.default_resources, found.pool_size) != (
            wanted.default_resources,
            wanted.pool_size,
        ):
            # Its numbers are settings; the rest of it nobody can change.
            with contextlib.suppress(Conflict):
                wanted = dataclasses.replace(
                    wanted, created_at=found.created_at, number=found.number + 1
                )
                await self._store.templates.supersede(
                    found, wanted, event=self._event(wanted, "changed")
                )

    async def create(
        self, template: Template, *, credentials: RegistryAuth | None = None
    ) -> Template:
        template = await self._supplied(template, credentials, None)
        template = await self._settled(template)
        await self._check(template)
        await self._store.templates.add(template, event=self._event(template, "created"))
        await self.tell()
        return template

    async def tell(self) -> None:
        """One was made, changed or removed: here and to the other replicas."""
        self.forget()
        self._feed.event_stored()
        try:
            await self._coordination.notify(CHANGED)
        except TemporaryError as error:
            # They forget what they know when they hear of the back-end again.
            log.info("templates.not_told", error=error.message)

    def forget(self) -> None:
        """Read what is needed anew: something was changed."""
        self._changes += 1
        self._known.clear()
        self.notify()

    def notify(self) -> None:
        for observer in self._observers:
            observer.templates_changed()

    async def get(self, template_id: str) -> Template:
        """Its newest version, as far as that has come."""
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
            if changes == self._changes:  # Else what was read may be of before the change.
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
        """Newest first; a cursor is the number of the last one that was seen."""
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
        """PUT: all fields anew, as a new version. Sessions that run keep theirs."""
        old = await self.get(template.id)
        if template.id == DEFAULT_TEMPLATE:
            raise Conflict(
                f"Template {DEFAULT_TEMPLATE} is set by the server's settings; create another one.",
                code="template_built_in",
            )
        template = dataclasses.replace(template, created_at=old.created_at)
        template = await self._supplied(template, credentials, old)
        template = await self._settled(template)
        if _built_alike(old, template):
            template = dataclasses.replace(template, status=old.status, build=old.build)
        await self._check(template)
        return await self._supersede(old, template)

    async def build(self, template_id: str) -> Template:
        """The same again as a new version, with the packages that there are now."""
        old = await self.get(template_id)
        if old.build is None:
            raise Conflict(
                f"Template {template_id} has nothing to be built.", code="template_not_built"
            )
        fresh = f"{old.id}/{old.created_at}/{old.number + 1}"
        template = await self._settled(
            dataclasses.replace(old, updated_at=self._clock.now()), fresh=fresh
        )
        return await self._supersede(old, template)

    async def _supersede(self, old: Template, template: Template) -> Template:
        if not old.status.settled:
            # Whoever is at it finds that it has moved on.
            old = dataclasses.replace(
                old,
                status=TemplateStatus.FAILED,
                build=dataclasses.replace(
                    old.build or Build(), message=f"Version {old.number + 1} took its place."
                ),
            )
        numbered = dataclasses.replace(template, number=old.number + 1)
        template = await self._store.templates.supersede(
            old, template, event=self._event(numbered, "changed")
        )
        await self.tell()
        return template

    async def _supplied(
        self, template: Template, credentials: RegistryAuth | None, old: Template | None
    ) -> Template:
        """With what its image is made from beside it."""
        await self.build_inputs.check(template)
        before = None if old is None else old.registry
        registry = await self.build_inputs.sealed(template, credentials, before)
        return dataclasses.replace(template, registry=registry)

    async def _settled(self, template: Template, *, fresh: str = "") -> Template:
        """
        With its base looked up and its layers named, so that nothing which happens to another
        template changes this one; to be built if it has packages. With `fresh`, its own layer is
        like no other.
        """
        build = template.build
        if self._driver.images.image_layer(template) is not None:
            return await self._with_image(template, build or Build(), fresh)
        if build is None:
            return template
        if template.image:
            raise InvalidRequest(
                "image: packages are put on a base; name it as `base_image`.", field="image"
            )
        base = await self._base(template)
        layers, root = base.layers, base.root
        inherited = base.build.python_packages if base.build is not None else ()
        if build.python_packages or inherited:
            await require_packages(self._driver).check()
        if build.debian_packages:
            packages = tuple(sorted(set(build.debian_packages)))
            made_from = [root, [layer.name for layer in layers], packages, fresh]
            name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:40]
            layers = (*layers, Layer(name, packages))
        return dataclasses.replace(
            template,
            python=template.python or base.python,
            status=TemplateStatus.PENDING,
            build=Build(
                debian_packages=build.debian_packages,
                python_packages=_requirements(inherited, build.python_packages),
                root=root,
                layers=layers,
                anew=bool(fresh),
            ),
        )

    async def _with_image(self, template: Template, build: Build, fresh: str) -> Template:
        """The same where templates are images: to be built unless all of it is there already."""
        base = await self._base_with_image(template, build)
        inherited: tuple[str, ...] = ()
        layers: tuple[Layer, ...] = ()
        if base is not None and base.build is not None:
            inherited, layers = base.build.python_packages, base.layers
        found = Build(
            debian_packages=build.debian_packages,
            python_packages=_requirements(inherited, build.python_packages),
            root="" if base is None or template.dockerfile else base.root,
            layers=layers,
            anew=bool(fresh),
        )
        template = dataclasses.replace(
            template,
            python=template.python or ("" if base is None else base.python),
            status=TemplateStatus.PENDING,
            build=found,
        )
        if not layers or fresh:
            layer = self._driver.images.image_layer(template, fresh=fresh)
            assert layer is not None
            found = dataclasses.replace(found, layers=(layer,))
            template = dataclasses.replace(template, build=found)
        await self._driver.check(template)
        if found.python_packages:
            await require_packages(self._driver).check()
            return template
        try:
            if not await self._driver.images.is_built(template):
                return template
            image = await self._driver.images.inspect(template)
        except TemporaryError as error:
            log.info("template.not_looked_up", template_id=template.id, error=error.message)
            return template
        return dataclasses.replace(
            template,
            status=TemplateStatus.READY,
            build=dataclasses.replace(found, image=image),
        )

    async def _base_with_image(self, template: Template, build: Build) -> Template | None:
        """What it is put on, when it has neither an image nor a Dockerfile of its own."""
        if template.image or template.dockerfile:
            return None
        of_template = template.base_image.startswith(BASE_TEMPLATE)
        if not of_template and not build.python_packages:
            return None
        base = await self._base(template)
        if of_template and (base.dockerfile or base.registry is not None):
            raise InvalidRequest(
                f"base_image: {base.id} has a Dockerfile or credentials of its own, and is no base "
                "for another template here; give this one the same.",
                field="base_image",
            )
        return base

    async def _base(self, template: Template) -> Template:
        """What it is put on, as a template."""
        name = template.base_image
        if not name.startswith(BASE_TEMPLATE):
            return dataclasses.replace(template, image=name, build=None, python="")
        base_id = name.removeprefix(BASE_TEMPLATE)
        if base_id == template.id:
            raise InvalidRequest(
                "base_image: a template is no base of its own.", field="base_image"
            )
        try:
            return await self.ready(base_id)
        except NotFound as error:
            raise InvalidRequest(f"base_image: {error.message}", field="base_image") from error

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
        event = self._event(await self.get(template_id), "removed")
        if not await self._store.templates.remove(template_id, event=event):
            raise _not_found(template_id)
        await self.tell()
        try:
            await self.build_logs.forget(template_id)
        except TemporaryError as error:
            log.warning("template.log_left", template_id=template_id, error=error.message)

    def _event(self, template: Template, what: str) -> Event:
        return template_event(template, what, self._clock.now())

    async def _check(self, template: Template) -> None:
        if template.pool_size > self._settings.pool.max_size:
            raise InvalidRequest(
                f"pool_size: at most {self._settings.pool.max_size} are allowed here.",
                field="pool_size",
            )
        if template.pool_max is not None and template.pool_max > self._settings.pool.max_size:
            raise InvalidRequest(
                f"pool_max: at most {self._settings.pool.max_size} are allowed here.",
                field="pool_max",
            )
        if template.pool_max is not None and template.pool_max < template.pool_size:
            raise InvalidRequest(
                f"pool_max: at least {template.pool_size} are to be ready, by pool_size.",
                field="pool_max",
            )
        await self.check_resources(template.default_resources)
        await self._driver.check(template)

    async def check_resources(self, resources: Resources) -> None:
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
        await self._node_limits.check(resources)


def _requirements(inherited: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Written in one way, each package once, as the template itself has it."""
    try:
        merged = packages.merged(
            [packages.read(each) for each in inherited],
            [packages.read(each) for each in own],
        )
    except InvalidRequest as error:
        words = error.message.replace("dependencies:", "python_packages:")
        raise InvalidRequest(words, field="python_packages") from error
    return tuple(each.requirement for each in merged)


def _not_found(template_id: str) -> NotFound:
    return NotFound(f"No template is named {template_id}.", code="template_not_found")


def _not_ready(template: Template) -> Conflict:
    why = template.build.message if template.build is not None else None
    words = f"Template {template.id} is not ready: its build is {template.status}."
    return Conflict(
        f"{words} {why}" if why else words,
        code="template_not_ready",
        template_status=template.status.value,
    )


def _built_alike(old: Template, new: Template) -> bool:
    """Whether what was built of one is what the other needs."""
    if old.build is None or new.build is None or old.status is not TemplateStatus.READY:
        return False
    return (
        old.python == new.python
        and all(
            getattr(old.build, name) == getattr(new.build, name)
            for name in ("root", "debian_packages", "python_packages")
        )
        and (old.layers == new.layers or _same_image(old, new))
    )


def _same_image(old: Template, new: Template) -> bool:
    """Whether their images are made from the same, though one of them was built anew."""
    return (
        bool(old.layers and new.layers)
        and all(layer.image for layer in (*old.layers, *new.layers))
        and not new.base_image.startswith(BASE_TEMPLATE)
        and (old.dockerfile, old.build_context, old.root)
        == (new.dockerfile, new.build_context, new.root)
    )
