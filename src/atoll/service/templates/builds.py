"""
Builds templates on this node: installs packages on a base, or pulls or builds an image.

A version with something to build is `pending` until a replica begins an attempt, `building` during
the attempt, and then `ready` or `failed`. A temporary failure is retried, one second later each
time; any other failure is final. An attempt that was interrupted is repeated by the replica that
finds it. Layers and environments that this node has are not built again.

A version is `ready` once one node has built it. Each other node builds it when it first needs it.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import (
    AtollError,
    LeaseLost,
    PermanentError,
    RequestError,
    TemporaryError,
    VersionConflict,
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

UNEXPECTED = "Internal error. See the server log."

log = structlog.get_logger(__name__)

MAX_MESSAGE = 2000
"""Characters: every list of templates contains it."""
FAILED_SECONDS = 10.0
"""How long a failure on this node is reported before the build is repeated."""
FOLLOW_SECONDS = 1.0
"""Pause between two reads of the log of a build that another replica runs."""


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
        """Ready versions that are being built because this node lacks them."""
        self._attempts: set[tuple[str, int]] = set()
        """Versions that are being built for the first time, anywhere."""
        self._failed_here: dict[tuple[str, int], tuple[float, AtollError]] = {}
        """Last failure of a version on this node, and until when it is reported."""

    @property
    def building(self) -> list[tuple[str, int]]:
        """Versions that this process builds: template id and number."""
        return sorted(self._here | self._attempts)

    def fits(self, template: Template) -> bool:
        """Whether this node can build it: layers are images on some nodes and not on others."""
        of_image = any(layer.image for layer in template.layers)
        return not template.layers or of_image == (
            self._driver.images.image_layer(template) is not None
        )

    async def attempt(self, template_id: str) -> None:
        """Make one attempt to build the newest version of a template, if it is pending."""
        template = await self._store.templates.get(template_id)
        if template is None or template.status.settled or template.build is None:
            return
        try:
            template = await self._begin(template, template.build)
            key = (template.id, template.number)
            self._attempts.add(key)
            try:
                async with self._logs.writing(template) as build_log:
                    ended = await self._attempt(template, build_log)
            finally:
                self._attempts.discard(key)
            await self._store.templates.save(ended, event=self._event(ended))
        except VersionConflict as error:
            # The template was replaced or removed meanwhile.
            log.info("build.given_up", template_id=template_id, error=error.message)
        await self._templates.publish_change()

    async def _begin(self, template: Template, build: Build) -> Template:
        begun = dataclasses.replace(build, attempts=build.attempts + 1, message=None, retry_at=None)
        template = dataclasses.replace(template, status=TemplateStatus.BUILDING, build=begun)
        template = await self._store.templates.save(template, event=self._event(template))
        await self._templates.publish_change()
        return template

    def _event(self, template: Template) -> Event:
        return template_event(template, template.status, self._clock.now())

    async def _attempt(self, template: Template, build_log: BuildLog) -> Template:
        """The version as it is after the attempt."""
        build = template.build
        assert build is not None
        build_log.line(
            f"Attempt {build.attempts} to build {template.id}, version {template.number}."
        )
        try:
            build = await self._build(template, build_log)
            build_log.line("Ready.")
            return dataclasses.replace(template, status=TemplateStatus.READY, build=build)
        except LeaseLost:
            raise
        except (RequestError, PermanentError) as error:
            return _failed(template, build, error.message, build_log)
        except TemporaryError as error:
            return self._retry_later(template, build, error.message, build_log)
        except Exception as error:
            # A defect: it is logged, and retried only as often as a temporary failure.
            log.error("build.internal_error", template_id=template.id, exc_info=error)
            return self._retry_later(template, build, UNEXPECTED, build_log)

    def _retry_later(
        self, template: Template, build: Build, why: str, build_log: BuildLog
    ) -> Template:
        """`pending` again, or `failed` after the last retry."""
        if build.attempts > self._settings.build_retries:
            return _failed(
                template, build, f"{why} Gave up after {build.attempts} attempts.", build_log
            )
        pause = self._settings.build_backoff * build.attempts
        build_log.line(f"{why} Next attempt in {pause.total_seconds():g} s.")
        later = dataclasses.replace(
            build, message=why[:MAX_MESSAGE], retry_at=self._clock.now() + pause
        )
        return dataclasses.replace(template, status=TemplateStatus.PENDING, build=later)

    async def _build(self, template: Template, build_log: BuildLog) -> Build:
        """Build everything on this node; returns the build with its results."""
        build = template.build
        assert build is not None
        if build.layers:
            async with self._layer(build.layers[-1], template):
                if await self._driver.images.is_built(template):
                    build_log.line("This node already has the layers.")
                else:
                    await self._make(template, build_log.write)
        await self._driver.check(template)
        environment, installed = None, build.installed
        if build.python_packages:
            environment, installed = await self._packages.build(
                template,
                build.python_packages,
                timeout=self._settings.build_timeout,
                listener=build_log.write,
                anew=build.anew,
            )
            build_log.line(f"Python packages: {' '.join(installed)}")
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
        """Lease to build the template's layers, of which this is the last, on this node."""
        key = f"layer:{self._node_id}:{layer.name}"
        return self._leases.lease(key, f"{self._leases.replica}/{key}/{template.edition}")

    async def provide(self, template: Template) -> None:
        """Return if this node has the template; otherwise begin to build it, and raise."""
        layer = self._last_layer(template)
        if template.build is None and layer is None:
            return
        if await self._driver.images.is_built(template) and await self._packages.provided(template):
            return
        key = (template.id, template.number)
        failed = self._failed_here.get(key)
        if failed is not None and self._clock.monotonic() < failed[0]:
            raise _reported_again(failed[1])
        if key not in self._here:
            self._here.add(key)
            building = self._background.start(
                self._build_here(template), f"build {template.id} here"
            )
            building.add_done_callback(lambda _: self._here.discard(key))
        raise TemporaryError(
            f"Template {template.id} is being built on this node. Retry in a few seconds.",
            code="template_not_here",
        )

    def _last_layer(self, template: Template) -> Layer | None:
        """The last layer of a ready template; the node's default image if it names none."""
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
            # Reported to callers of `provide` until the build is repeated.
            until = self._clock.monotonic() + FAILED_SECONDS
            self._failed_here[key] = (until, error)
            raise
        self._failed_here.pop(key, None)
        self._templates.notify()

    # Logs

    async def log(self, template_id: str, number: int | None = None) -> bytes:
        return bytes((await self._logs.read(await self._version(template_id, number))).data)

    async def follow(
        self, template_id: str, number: int | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Output as `log` events and changes as `status` events, until the build has ended."""
        template = await self._version(template_id, number)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        position = 0
        shown: dict[str, Any] = {}
        while True:
            # In this order: the last output is stored before the final status.
            template = await self._version(template.id, template.number)
            build_log = await self._logs.read(template)
            build_log.more.clear()
            text = decoder.decode(build_log.after(position), template.status.settled)
            position = max(position, build_log.end)
            if text:
                yield StreamEvent(None, "log", {"text": text})
            if (now := _shown(template)) != shown:
                shown = now
                yield StreamEvent(None, "status", shown)
            if template.status.settled:
                return
            try:
                async with asyncio.timeout(FOLLOW_SECONDS):
                    await build_log.more.wait()
            except TimeoutError:
                continue

    async def _version(self, template_id: str, number: int | None) -> Template:
        if number is None:
            return await self._templates.get(template_id)
        found = await self._store.templates.numbered(template_id, number)
        return found or await self._templates.numbered(template_id, number)

    async def drop(self, template: Template) -> None:
        """Delete a version that no session uses, and the log of its build."""
        await self._store.templates.drop(template.id, template.number)
        await self._logs.drop(template)


def _reported_again(error: AtollError) -> PermanentError:
    return PermanentError(error.message, code=error.code)


def _failed(template: Template, build: Build, words: str, build_log: BuildLog) -> Template:
    build_log.line(f"Failed: {words}")
    words = words[:MAX_MESSAGE]
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
