"""
Python packages of sessions' own.

A set of packages is installed once on a node, and then is there for every session that asks for the
same set: that costs a look at a file. Sessions that ask for a set while it is being installed wait
for the same installation, on whichever replica of the node it runs; it goes on as long as one of
them waits, and each waits no longer than it said.

What a set comes to is known by the template's image, what its interpreter is and has, the
requirements, the index and the flags; an environment by the hashes of its wheels too. An image may
lie about its interpreter, so nothing is shared between images. Names of environments are made with
the database's secret, so that code in a sandbox cannot guess one. Sets of one image that come to
the same packages share one, unless source builds are allowed: code of a package then runs where it
is installed, and may lie about what it installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.drivers.base import InstallSpec
from atoll.errors import AtollError, Conflict, DependencyFailed, PermanentError, TemporaryError
from atoll.model import packages as model
from atoll.model.install import Dependency, Install, InstallStatus
from atoll.model.resources import Resources
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.packages.environments import require_packages
from atoll.service.packages.index import find_index
from atoll.service.packages.index_proxy import IndexProxy
from atoll.service.packages.running_install import RunningInstall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.coordination.leases import Leases
    from atoll.drivers.base import Driver, PackageEnvironments
    from atoll.model.packages import Interpreter, PackageSet
    from atoll.model.template import Template
    from atoll.service.packages.index import Index
    from atoll.settings import PackageSettings

VARIABLE = "ATOLL_PACKAGES"
"""Tells the executor of a session's packages, for PYTHONPATH and PATH."""
SCHEME = b"packages 2"
"""
Of names and keys. The first did not know images: what it named is used by the sessions that have it
and found for no other.
"""
LOG_SECONDS = 0.5
"""Pause between two times that the log is written down while it grows."""
MOST_EDITIONS = 1000

log = structlog.get_logger(__name__)

CONCURRENCY = 2
"""Installations that one control plane runs at the same time."""
RESOLUTION_TTL = timedelta(hours=24)
"""How long the versions that were chosen for requirements without exact versions are reused."""


class Packages:
    def __init__(
        self,
        driver: Driver,
        leases: Leases,
        clock: Clock,
        settings: PackageSettings,
        secret: str,
        node_id: str,
    ) -> None:
        self._driver = driver
        self._leases = leases
        self._clock = clock
        self._settings = settings
        self._secret = secret.encode()
        self._node_id = node_id
        self._index: Index | None = None
        self._interpreters: dict[tuple[str, datetime, int], Interpreter] = {}
        self._asking: dict[tuple[str, datetime, int], asyncio.Lock] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._running: dict[str, RunningInstall] = {}

    @property
    def _environments(self) -> PackageEnvironments:
        return require_packages(self._driver)

    # What sessions ask for

    async def begin(self, install: Install, template: Template) -> Install:
        """
        Checked, and `installed` if these packages are in the cache or the template has them. Raises
        `Conflict` with code `version_conflict`, or `InvalidRequest`.
        """
        dependencies = model.normalised(install.dependencies)
        install = dataclasses.replace(
            install, dependencies=dependencies, status=InstallStatus.INSTALLING
        )
        interpreter = await self._interpreter(template)
        if not install.allow_conflicts:
            _refuse_conflicts(model.conflicts(dependencies, interpreter.held), template)
        own = model.covered(dependencies, interpreter.packages)
        if own is not None:
            return _installed(install, None, own)
        found = await self._found(await self._key(install, interpreter), dependencies)
        return install if found is None else _installed(install, found.environment, found.installed)

    async def install(self, session_id: str, install: Install, template: Template) -> Install:
        """Installed, or `failed` with why."""
        try:
            interpreter = await self._interpreter(template)
            key = await self._key(install, interpreter)
            found = await self._found(key, install.dependencies)
            if found is None:
                found = await self._install(key, session_id, install, template, interpreter)
        except TimeoutError:
            words = f"The packages were not installed within {install.timeout} seconds."
        except PermanentError as error:
            words = error.message
        else:
            return _installed(install, found.environment, found.installed)
        log.info("packages.failed", session_id=session_id, error=words)
        return dataclasses.replace(install, status=InstallStatus.FAILED, message=words)

    async def ensure(self, session_id: str, install: Install, template: Template) -> Install:
        """
        Make a session's environment again if this node does not have it. It may have another name
        here, if an earlier version named it or its image has another id on each node.
        """
        name = install.environment
        if name is None or await self._environments.use(name):
            return install
        interpreter = await self._interpreter(template)
        pinned = (line.partition("==") for line in install.installed)
        exact = dataclasses.replace(
            install,
            dependencies=tuple(Dependency(name, f"=={version}") for name, _, version in pinned),
        )
        key = self._mac("again", name)
        done = await self._install(
            key, session_id, exact, template, interpreter, pins=install.dependencies
        )
        if done.installed != install.installed:
            raise DependencyFailed(
                f"The packages of session {session_id} cannot be made again: the template or the "
                "index has changed.",
            )
        return dataclasses.replace(install, environment=done.environment)

    def added(self, env: Mapping[str, str], environment: str) -> dict[str, str]:
        """Variables by which code finds the packages, on top of these."""
        return {**env, VARIABLE: self._environments.inside(environment)}

    async def log(self, session_id: str) -> bytes:
        """What was printed at a session's last installation; nothing when none was needed."""
        packages = self._driver.packages
        return (b"" if packages is None else await packages.read_log(session_id)) or b""

    # What templates ask for

    async def build(
        self,
        template: Template,
        requirements: Iterable[str],
        *,
        timeout: timedelta,
        hear: Callable[[bytes], None],
        anew: bool = False,
    ) -> tuple[str | None, tuple[str, ...]]:
        """
        An environment for all sessions of a template, and what is in it; none when its base has all
        of it. With `anew`, as the index has it now, whatever is remembered. Raises `TemporaryError`
        when the index does not answer.
        """
        dependencies = model.normalised(model.read(each) for each in requirements)
        # Who makes the template decides which versions it has.
        install = Install(dependencies, int(timeout.total_seconds()), allow_conflicts=True)
        interpreter = await self._interpreter(template)
        own = model.covered(dependencies, interpreter.packages)
        if own is not None:
            return None, own
        key = await self._key(install, interpreter)
        since = self._clock.now() if anew else None
        try:
            found = await self._found(key, dependencies, since) or await self._install(
                key, None, install, template, interpreter, hear=hear, since=since
            )
        except TimeoutError:
            raise PermanentError(
                f"The Python packages were not installed in {timeout}.", code="build_failed"
            ) from None
        return found.environment, found.installed

    async def provided(self, template: Template) -> bool:
        """Whether the template's environment is on this node; it counts as used now."""
        name = template.build.environment if template.build is not None else None
        return name is None or await self._environments.use(name)

    async def provide(self, template: Template, timeout: timedelta) -> None:
        """Make a template's environment, which another node made, here."""
        build = template.build
        if build is None or await self.provided(template):
            return
        bare = dataclasses.replace(template, build=dataclasses.replace(build, environment=None))
        interpreter = await self._interpreter(bare)
        exact = Install(
            tuple(model.read(line) for line in build.installed),
            int(timeout.total_seconds()),
            allow_conflicts=True,
        )
        key = self._mac("again", build.environment or "")
        asked = model.normalised(model.read(each) for each in build.python_packages)
        done = await self._install(key, None, exact, bare, interpreter, pins=asked)
        if done.environment != build.environment:
            raise PermanentError(
                f"The packages of template {template.id} cannot be made again on this node: its "
                "base or the index is another.",
                code="build_failed",
            )

    # How sets are known

    async def _found(
        self, key: str, dependencies: Iterable[Dependency], since: datetime | None = None
    ) -> PackageSet | None:
        if since is None and not model.is_pinned(dependencies):
            since = self._clock.now() - RESOLUTION_TTL
        return await self._environments.find(key, since=since)

    async def _interpreter(self, template: Template) -> Interpreter:
        """Asked once for each edition of a template."""
        edition = template.edition
        if len(self._interpreters) >= MOST_EDITIONS:
            self._interpreters.clear()
            self._asking.clear()
        # Each by itself: one that does not answer keeps no other waiting.
        async with self._asking.setdefault(edition, asyncio.Lock()):
            known = self._interpreters.get(edition)
            if known is None:
                known = await self._environments.interpreter(template)
                if template.id == DEFAULT_TEMPLATE:
                    known = dataclasses.replace(known, gives_way=True)
                self._interpreters[edition] = known
        if template.build is None or template.build.environment is None:
            return known
        # What was built for it comes in front of what its interpreter has.
        built = dict(line.split("==", 1) for line in template.build.installed)
        return dataclasses.replace(known, packages={**known.packages, **built})

    async def _known_index(self) -> Index:
        if self._index is None:
            self._index = await find_index(self._settings)
        return self._index

    async def _key(self, install: Install, interpreter: Interpreter) -> str:
        requirements = [dependency.requirement for dependency in install.dependencies]
        return self._mac("set", *await self._circumstances(install, interpreter), *requirements)

    async def _circumstances(self, install: Install, interpreter: Interpreter) -> tuple[str, ...]:
        """What else decides what is installed."""
        flags = f"{install.allow_conflicts} {self._settings.allow_source_builds}"
        return interpreter.fingerprint, (await self._known_index()).url, flags

    def _mac(self, *parts: str) -> str:
        data = json.dumps(parts).encode()
        return hmac.new(self._secret, SCHEME + data, hashlib.sha256).hexdigest()[:40]

    # Installing

    async def _install(
        self,
        key: str,
        session_id: str | None,
        install: Install,
        template: Template,
        interpreter: Interpreter,
        *,
        pins: tuple[Dependency, ...] | None = None,
        hear: Callable[[bytes], None] | None = None,
        since: datetime | None = None,
    ) -> PackageSet:
        """
        The log is kept by the session's id, where there is one, and told to `hear`. With `pins`,
        the dependencies are all that these once came to, and are installed as they are.
        """
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = RunningInstall()
            work = self._run(key, running, install, template, interpreter, pins=pins, since=since)
            running.task = asyncio.create_task(work, name=f"install {key}")
            running.task.add_done_callback(lambda _: self._running.pop(key, None))
        assert running.task is not None
        running.waiting += 1
        if hear is not None:
            hear(running.text)
            running.heard.append(hear)
        writing = asyncio.create_task(self._write_log(session_id, running))
        try:
            async with asyncio.timeout(install.timeout):
                return await asyncio.shield(running.task)
        except PermanentError as error:
            if session_id is None and running.away:
                words = f"The package index does not answer: {error.message}"
                raise TemporaryError(words, code="build_interrupted") from error
            raise
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.task.done():
                running.say("Nobody waits for it any more.")
                running.task.cancel()
                await asyncio.wait([running.task])
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            if hear is not None:
                running.heard.remove(hear)
            if session_id is not None:
                await asyncio.shield(self._environments.write_log(session_id, running.text))

    async def _run(
        self,
        key: str,
        running: RunningInstall,
        install: Install,
        template: Template,
        interpreter: Interpreter,
        *,
        pins: tuple[Dependency, ...] | None,
        since: datetime | None,
    ) -> PackageSet:
        exact = pins is not None
        circumstances = await self._circumstances(install, interpreter)
        if self._settings.allow_source_builds:
            # What is told as installed is not to be believed: only who asked for it gets it.
            asked = install.dependencies if pins is None else pins
            circumstances += ("asked for", *(each.requirement for each in asked))
        index, settings = await self._known_index(), self._settings
        owner = f"{self._leases.replica}/{ids.instance_id()}"
        async with self._leases.lease(f"packages:{self._node_id}:{key}", owner), self._slots:
            # Another replica may have been quicker.
            found = await self._found(key, install.dependencies, since)
            if found is not None:
                running.say("Installed by another control plane meanwhile.")
                return found
            async with (
                self._environments.downloads() as place,
                IndexProxy(index, settings, running.say, place) as gateway,
            ):
                spec = InstallSpec(
                    key=key,
                    template=template,
                    requirements=tuple(each.requirement for each in install.dependencies),
                    environment_name=lambda installed, digests: self._mac(
                        "environment", *circumstances, *installed, "of", *digests
                    ),
                    resources=Resources(
                        cpu=model.INSTALL_CPU,
                        memory=settings.memory,
                        disk=settings.disk,
                        max_processes=model.INSTALL_PROCESSES,
                    ),
                    serve_index=gateway.answer,
                    wheels=gateway.wheels,
                    on_output=running.hear,
                    template_packages=dict(interpreter.packages),
                    pinned={} if install.allow_conflicts or exact else dict(interpreter.held),
                    exact=exact,
                    source_builds=settings.allow_source_builds,
                )
                try:
                    done = await self._environments.install(spec)
                except AtollError as error:
                    running.away = gateway.away
                    if error.message.encode() not in running.text:
                        running.say(error.message)
                    raise
            running.say(f"Installed: {' '.join(done.installed)}")
            return done

    async def _write_log(self, session_id: str | None, running: RunningInstall) -> None:
        """While it grows, so that every replica of the node can show it."""
        written = None
        while True:
            if session_id is not None and running.size != written:
                written = running.size
                await self._environments.write_log(session_id, running.text)
            await asyncio.sleep(LOG_SECONDS)


def _installed(install: Install, environment: str | None, installed: tuple[str, ...]) -> Install:
    return dataclasses.replace(
        install,
        status=InstallStatus.INSTALLED,
        environment=environment,
        installed=installed,
        message=None,
    )


def _refuse_conflicts(found: list[dict[str, str]], template: Template) -> None:
    if not found:
        return
    words = "; ".join(
        f"{each['name']}{each['requested']} (the template has {each['template_has']})"
        for each in found
    )
    raise Conflict(
        f"Other versions than those of template {template.id} were asked for: {words}. With "
        "allow_version_conflicts they take the template's place.",
        code="version_conflict",
        conflicts=found,
    )
