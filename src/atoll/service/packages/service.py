"""
Installs Python packages for sessions and templates, once per node and set of packages.

A session that requests a set which the node has gets it at the cost of a file lookup. Sessions that
request a set while it is being installed wait for the same installation, whichever replica of the
node runs it. An installation continues as long as one of them waits, and each waits for at most its
own timeout.

The key of a set consists of the template's image, the interpreter and its packages, the
requirements, the index and the flags; the name of an environment also depends on the hashes of its
wheels. Nothing is shared between images, because an image may lie about its interpreter. Names are
HMACs with the database's secret, so that code in a sandbox cannot guess them. Sets of one image
that resolve to the same packages share an environment, unless source builds are allowed: then code
of a package runs during its installation and may lie about what it installed.
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
"""From this variable the executor sets PYTHONPATH and PATH."""
SCHEME = b"packages 2"
"""
Version of names and keys. Version 1 did not include the image: its environments are used only by
the sessions that already have them.
"""
LOG_SECONDS = 0.5
"""Pause between two writes of a growing log."""
MAX_INTERPRETERS = 1000
"""Cached descriptions of interpreters."""

log = structlog.get_logger(__name__)

CONCURRENCY = 2
"""Installations that one replica runs at the same time."""
RESOLUTION_TTL = timedelta(hours=24)
"""How long the versions that were chosen for requirements without exact versions are reused."""


@dataclasses.dataclass(frozen=True)
class _Request:
    install: Install
    template: Template
    interpreter: Interpreter
    pins: tuple[Dependency, ...] | None = None
    """
    The requirements that once resolved to `install.dependencies`, which are then installed exactly.
    """
    since: datetime | None = None
    """Ignore sets that were installed before this time."""


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

    # Sessions

    async def begin(self, install: Install, template: Template) -> Install:
        """
        Check a request; `installed` at once if the node has the packages or the template contains
        them. Raises `Conflict` with code `version_conflict`, or `InvalidRequest`.
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
        """Install the packages; returns `installed`, or `failed` with a message."""
        try:
            interpreter = await self._interpreter(template)
            key = await self._key(install, interpreter)
            found = await self._found(key, install.dependencies)
            if found is None:
                found = await self._install(
                    key, _Request(install, template, interpreter), session_id=session_id
                )
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
        Recreate a session's environment if this node does not have it. Its name may differ here: an
        earlier version may have named it, or the image may have another id on each node.
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
        request = _Request(exact, template, interpreter, pins=install.dependencies)
        done = await self._install(key, request, session_id=session_id)
        if done.installed != install.installed:
            raise DependencyFailed(
                f"Cannot recreate the packages of session {session_id}: the template or the index "
                "has changed.",
            )
        return dataclasses.replace(install, environment=done.environment)

    def added(self, env: Mapping[str, str], environment: str) -> dict[str, str]:
        """`env` with the variable by which code finds the packages."""
        return {**env, VARIABLE: self._environments.inside(environment)}

    async def log(self, session_id: str) -> bytes:
        """Log of a session's last installation; empty if none was needed."""
        packages = self._driver.packages
        return (b"" if packages is None else await packages.read_log(session_id)) or b""

    # Templates

    async def build(
        self,
        template: Template,
        requirements: Iterable[str],
        *,
        timeout: timedelta,
        listener: Callable[[bytes], None],
        anew: bool = False,
    ) -> tuple[str | None, tuple[str, ...]]:
        """
        An environment for all sessions of a template, and the packages in it; null if the base
        contains them. `anew` ignores what was installed before. Raises `TemporaryError` if the
        index does not answer.
        """
        dependencies = model.normalised(model.read(each) for each in requirements)
        # The author of the template decides which versions it has.
        install = Install(dependencies, int(timeout.total_seconds()), allow_conflicts=True)
        interpreter = await self._interpreter(template)
        own = model.covered(dependencies, interpreter.packages)
        if own is not None:
            return None, own
        key = await self._key(install, interpreter)
        since = self._clock.now() if anew else None
        try:
            found = await self._found(key, dependencies, since) or await self._install(
                key, _Request(install, template, interpreter, since=since), listener=listener
            )
        except TimeoutError:
            raise PermanentError(
                f"Installing the Python packages took longer than {timeout}.", code="build_failed"
            ) from None
        return found.environment, found.installed

    async def provided(self, template: Template) -> bool:
        """Whether this node has the template's environment; marks it as used."""
        name = template.build.environment if template.build is not None else None
        return name is None or await self._environments.use(name)

    async def provide(self, template: Template, timeout: timedelta) -> None:
        """Recreate on this node the environment that another node made for a template."""
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
        done = await self._install(key, _Request(exact, bare, interpreter, pins=asked))
        if done.environment != build.environment:
            raise PermanentError(
                f"Cannot recreate the packages of template {template.id} on this node: its base or "
                "the index differs.",
                code="build_failed",
            )

    # Keys and names

    async def _found(
        self, key: str, dependencies: Iterable[Dependency], since: datetime | None = None
    ) -> PackageSet | None:
        if since is None and not model.is_pinned(dependencies):
            since = self._clock.now() - RESOLUTION_TTL
        return await self._environments.find(key, since=since)

    async def _interpreter(self, template: Template) -> Interpreter:
        """The driver is asked once for each version of a template."""
        edition = template.edition
        if len(self._interpreters) >= MAX_INTERPRETERS:
            self._interpreters.clear()
            self._asking.clear()
        # A lock per version: a slow one must not block the others.
        async with self._asking.setdefault(edition, asyncio.Lock()):
            known = self._interpreters.get(edition)
            if known is None:
                known = await self._environments.interpreter(template)
                if template.id == DEFAULT_TEMPLATE:
                    known = dataclasses.replace(known, gives_way=True)
                self._interpreters[edition] = known
        if template.build is None or template.build.environment is None:
            return known
        # Packages that were built for the template precede those of its interpreter.
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
        """Everything but the requirements that decides what is installed."""
        flags = f"{install.allow_conflicts} {self._settings.allow_source_builds}"
        return interpreter.fingerprint, (await self._known_index()).url, flags

    def _mac(self, *parts: str) -> str:
        data = json.dumps(parts).encode()
        return hmac.new(self._secret, SCHEME + data, hashlib.sha256).hexdigest()[:40]

    # Installing

    async def _install(
        self,
        key: str,
        request: _Request,
        *,
        session_id: str | None = None,
        listener: Callable[[bytes], None] | None = None,
    ) -> PackageSet:
        """The log is stored under the session's id, if there is one, and passed to `listener`."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = RunningInstall()
            work = self._run(key, running, request)
            running.task = asyncio.create_task(work, name=f"install {key}")
            running.task.add_done_callback(lambda _: self._running.pop(key, None))
        assert running.task is not None
        running.waiting += 1
        if listener is not None:
            listener(running.text)
            running.listeners.append(listener)
        writing = asyncio.create_task(self._store_log(session_id, running))
        try:
            async with asyncio.timeout(request.install.timeout):
                return await asyncio.shield(running.task)
        except PermanentError as error:
            if session_id is None and running.failed_temporarily:
                words = f"The package index does not answer: {error.message}"
                raise TemporaryError(words, code="build_interrupted") from error
            raise
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.task.done():
                running.say("Cancelled: no session waits for it any more.")
                running.task.cancel()
                await asyncio.wait([running.task])
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            if listener is not None:
                running.listeners.remove(listener)
            if session_id is not None:
                await asyncio.shield(self._environments.write_log(session_id, running.text))

    async def _run(
        self,
        key: str,
        running: RunningInstall,
        request: _Request,
    ) -> PackageSet:
        install, interpreter, pins = request.install, request.interpreter, request.pins
        exact = pins is not None
        circumstances = await self._circumstances(install, interpreter)
        if self._settings.allow_source_builds:
            # What the installation reports cannot be trusted, so only the same requests share it.
            asked = install.dependencies if pins is None else pins
            circumstances += ("asked for", *(each.requirement for each in asked))
        index, settings = await self._known_index(), self._settings
        owner = f"{self._leases.replica}/{ids.instance_id()}"
        async with self._leases.lease(f"packages:{self._node_id}:{key}", owner), self._slots:
            # Another replica may have been faster.
            found = await self._found(key, install.dependencies, request.since)
            if found is not None:
                running.say("Another replica has installed it meanwhile.")
                return found
            # Imported here, with the HTTP client: most processes install nothing.
            from atoll.service.packages.index_proxy import IndexProxy

            async with (
                self._environments.downloads() as place,
                IndexProxy(index, settings, running.say, place) as proxy,
            ):
                spec = InstallSpec(
                    key=key,
                    template=request.template,
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
                    serve_index=proxy.answer,
                    wheels=proxy.wheels,
                    on_output=running.add_output,
                    template_packages=dict(interpreter.packages),
                    pinned={} if install.allow_conflicts or exact else dict(interpreter.held),
                    exact=exact,
                    source_builds=settings.allow_source_builds,
                )
                try:
                    done = await self._environments.install(spec)
                except AtollError as error:
                    running.failed_temporarily = proxy.failed_temporarily
                    if error.message.encode() not in running.text:
                        running.say(error.message)
                    raise
            running.say(f"Installed: {' '.join(done.installed)}")
            return done

    async def _store_log(self, session_id: str | None, running: RunningInstall) -> None:
        """Store the growing log, so that every replica of the node can show it."""
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
        f"The request conflicts with packages of template {template.id}: {words}. Set "
        "allow_version_conflicts to replace the template's versions.",
        code="version_conflict",
        conflicts=found,
    )
