"""
Builds of templates: packages put on a base, or an image pulled or built, on this node.

A version that has packages, or an image that is not there, is `pending` until some replica takes
it, `building` while one is at it, and then `ready` or `failed`. A fault that may pass is followed
by another attempt, a second later each time; any other ends it. An attempt that was cut short is
made again by whoever finds it. What was built before, here, is not built again.

A version that is ready was built on some node. Another one builds it when it needs it.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import (
    AtollError,
    Conflict,
    LeaseLost,
    PermanentError,
    RequestError,
    TemporaryError,
)
from atoll.model.event import template_event
from atoll.model.stream_event import StreamEvent
from atoll.model.template import TemplateStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from atoll.drivers.base import Driver
    from atoll.model.event import Event
    from atoll.model.template import Build, Layer, Template
    from atoll.service.packages.service import Packages
    from atoll.service.replica import Replica
    from atoll.service.templates.build_logs import BuildLog
    from atoll.service.templates.service import Templates
    from atoll.settings import TemplateSettings

UNEXPECTED = "Something went wrong that was not foreseen; the log of the server has it."

log = structlog.get_logger(__name__)

LONGEST_MESSAGE = 2000
"""Characters: it is in every list of templates."""
FAILED_SECONDS = 10.0
"""How long it is told that a build on this node failed, before it is tried again."""
FOLLOW_SECONDS = 1.0
"""Time between two looks at a build that another replica runs."""


class Builds:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        templates: Templates,
        packages: Packages,
        settings: TemplateSettings,
    ) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._background = replica.background
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._driver = driver
        self._templates = templates
        self._inputs = templates.build_inputs
        self._logs = templates.build_logs
        self._packages = packages
        self._settings = settings
        self._here: set[tuple[str, int]] = set()
        """Versions that are being built because this node lacks them."""
        self._tried_here: set[tuple[str, int]] = set()
        """Versions that are being built for the first time."""
        self._failed_here: dict[tuple[str, int], tuple[float, AtollError]] = {}
        """Why the last of these failed, and how long that is told in place of another try."""

    @property
    def building(self) -> list[tuple[str, int]]:
        """Versions that this process is making, by template and number."""
        return sorted(self._here | self._tried_here)

    def fits(self, template: Template) -> bool:
        """Whether this node can build it: one with images has other layers than one without."""
        of_image = any(layer.image for layer in template.layers)
        return not template.layers or of_image == (
            self._driver.images.image_layer(template) is not None
        )

    async def attempt(self, template_id: str) -> None:
        """One attempt at a template's newest version, if it is to be built."""
        template = await self._store.templates.get(template_id)
        if template is None or template.status.settled or template.build is None:
            return
        try:
            template = await self._begin(template, template.build)
            key = (template.id, template.number)
            self._tried_here.add(key)
            try:
                async with self._logs.written(template) as said:
                    ended = await self._tried(template, said)
            finally:
                self._tried_here.discard(key)
            await self._store.templates.save(ended, event=self._event(ended))
        except Conflict as error:
            # Replaced or removed meanwhile: nobody waits for this one.
            log.info("build.given_up", template_id=template_id, error=error.message)
        await self._templates.tell()

    async def _begin(self, template: Template, build: Build) -> Template:
        begun = dataclasses.replace(build, attempts=build.attempts + 1, message=None, retry_at=None)
        template = dataclasses.replace(template, status=TemplateStatus.BUILDING, build=begun)
        template = await self._store.templates.save(template, event=self._event(template))
        await self._templates.tell()
        return template

    def _event(self, template: Template) -> Event:
        """A build that is to be tried again is `pending`."""
        return template_event(template, template.status, self._clock.now())

    async def _tried(self, template: Template, said: BuildLog) -> Template:
        """What the version is after an attempt."""
        build = template.build
        assert build is not None
        said.line(f"Attempt {build.attempts} at version {template.number} of {template.id}.")
        try:
            build = await self._made(template, said)
            said.line("Ready.")
            return dataclasses.replace(template, status=TemplateStatus.READY, build=build)
        except LeaseLost:
            raise
        except (RequestError, PermanentError) as error:
            return _failed(template, build, error.message, said)
        except TemporaryError as error:
            return self._later(template, build, error.message, said)
        except Exception as error:
            # Of ours, or of something that nobody thought of: not for ever, and not in silence.
            log.error("build.broke", template_id=template.id, exc_info=error)
            return self._later(template, build, UNEXPECTED, said)

    def _later(self, template: Template, build: Build, why: str, said: BuildLog) -> Template:
        """To be tried again, unless it was often enough."""
        if build.attempts > self._settings.build_retries:
            return _failed(
                template, build, f"{why} Given up after {build.attempts} attempts.", said
            )
        pause = self._settings.build_backoff * build.attempts
        said.line(f"{why} Tried again in {pause.total_seconds():g} s.")
        later = dataclasses.replace(
            build, message=why[:LONGEST_MESSAGE], retry_at=self._clock.now() + pause
        )
        return dataclasses.replace(template, status=TemplateStatus.PENDING, build=later)

    async def _made(self, template: Template, said: BuildLog) -> Build:
        """All of it on this node, and what there is to be told of it."""
        build = template.build
        assert build is not None
        if build.layers:
            async with self._layer(build.layers[-1], template):
                if await self._driver.images.is_built(template):
                    said.line("Its layers are there already.")
                else:
                    await self._make(template, said.say)
        await self._driver.check(template)
        environment, installed = None, build.installed
        if build.python_packages:
            environment, installed = await self._packages.build(
                template,
                build.python_packages,
                timeout=self._settings.build_timeout,
                hear=said.say,
                anew=build.anew,
            )
            said.line(f"Python packages: {' '.join(installed)}")
        image = await self._driver.images.inspect(template)
        return dataclasses.replace(build, environment=environment, installed=installed, image=image)

    async def _make(self, template: Template, say: Callable[[bytes], None]) -> None:
        await self._driver.images.build(
            template,
            timeout=self._settings.build_timeout,
            on_output=say,
            inputs=await self._inputs.of(template),
        )

    def _layer(self, layer: Layer, template: Template) -> Any:
        """The right to build the template's layers, of which this is the last, on this node."""
        key = f"layer:{self._node_id}:{layer.name}"
        return self._leases.lease(key, f"{self._leases.replica}/{key}/{template.edition}")

    async def provide(self, template: Template) -> None:
        """
        Raise `TemporaryError` when this node has yet to build the template, which it then begins.
        """
        layer = self._last_layer(template)
        if template.build is None and layer is None:
            return
        if await self._driver.images.is_built(template) and await self._packages.provided(template):
            return
        key = (template.id, template.number)
        failed = self._failed_here.get(key)
        if failed is not None and self._clock.monotonic() < failed[0]:
            raise _repeated(failed[1])
        if key not in self._here:
            self._here.add(key)
            building = self._background.start(
                self._build_here(template), f"build {template.id} here"
            )
            building.add_done_callback(lambda _: self._here.discard(key))
        raise TemporaryError(
            f"Template {template.id} is being built on this node; ask again.",
            code="template_not_here",
        )

    def _last_layer(self, template: Template) -> Layer | None:
        """What is built last of a template that is ready; an image may be the node's own."""
        return template.layers[-1] if template.layers else self._driver.images.image_layer(template)

    async def _build_here(self, template: Template) -> None:
        timeout = self._settings.build_timeout
        key, layer = (template.id, template.number), self._last_layer(template)
        try:
            if layer is not None:
                async with self._layer(layer, template):
                    await self._make(template, lambda data: None)
            await self._packages.provide(template, timeout)
        except (RequestError, PermanentError) as error:
            # Whoever needs it is told, and after a while it is tried again.
            until = self._clock.monotonic() + FAILED_SECONDS
            self._failed_here[key] = (until, error)
            raise
        self._failed_here.pop(key, None)
        self._templates.notify()

    # What is told of it

    async def log(self, template_id: str, number: int | None = None) -> bytes:
        return bytes((await self._logs.read(await self._version(template_id, number))).data)

    async def follow(
        self, template_id: str, number: int | None = None
    ) -> AsyncIterator[StreamEvent]:
        """What is printed, as `log`, and each change as `status`, until the build has ended."""
        template = await self._version(template_id, number)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        position = 0
        shown: dict[str, Any] = {}
        while True:
            # In this order: what is printed last is there before the build has ended.
            template = await self._version(template.id, template.number)
            said = await self._logs.read(template)
            said.more.clear()
            text = decoder.decode(said.after(position), template.status.settled)
            position = max(position, said.end)
            if text:
                yield StreamEvent(None, "log", {"text": text})
            if (now := _shown(template)) != shown:
                shown = now
                yield StreamEvent(None, "status", shown)
            if template.status.settled:
                return
            try:
                async with asyncio.timeout(FOLLOW_SECONDS):
                    await said.more.wait()
            except TimeoutError:
                continue

    async def _version(self, template_id: str, number: int | None) -> Template:
        if number is None:
            return await self._templates.get(template_id)
        found = await self._store.templates.numbered(template_id, number)
        return found or await self._templates.numbered(template_id, number)

    async def drop(self, template: Template) -> None:
        """Forget a version that nobody uses, and what its build printed."""
        await self._store.templates.drop(template.id, template.number)
        await self._logs.drop(template)


def _repeated(error: AtollError) -> PermanentError:
    return PermanentError(error.message, code=error.code)


def _failed(template: Template, build: Build, words: str, said: BuildLog) -> Template:
    said.line(f"Failed: {words}")
    words = words[:LONGEST_MESSAGE]
    log.info("build.failed", template_id=template.id, number=template.number, error=words)
    return dataclasses.replace(
        template,
        status=TemplateStatus.FAILED,
        build=dataclasses.replace(build, message=words, retry_at=None),
    )


def _shown(template: Template) -> dict[str, Any]:
    build = template.build
    return {
        "version": template.number,
        "status": template.status.value,
        "attempts": 0 if build is None else build.attempts,
        "message": None if build is None else build.message,
    }
