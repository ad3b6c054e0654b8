"""
The packages of a session through its life: at its creation, later on, and made again where they are
missing.

What the record of a session says is what its executions find. A set that is added to is installed
first and recorded then, so that a failure, or the end of this process, leaves the old one in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, Conflict, DependencyFailed
from atoll.model import packages as model
from atoll.model.install import Install, InstallStatus
from atoll.model.session import Cause, SessionStatus, Warning
from atoll.service.sessions.connections import NOT_OF_THE_SESSION
from atoll.service.sessions.service import is_installing

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.coordination.leases import Leases
    from atoll.model.install import Dependency
    from atoll.model.session import Session
    from atoll.model.template import Template
    from atoll.service.background import BackgroundTasks
    from atoll.service.packages.service import Packages
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.service.sessions.service import Sessions
    from atoll.service.templates.service import Templates
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)


class Dependencies:
    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        connections: Connections,
        templates: Templates,
        provisioning: Provisioning,
        packages: Packages,
        leases: Leases,
        background: BackgroundTasks,
        clock: Clock,
        node_id: str,
    ) -> None:
        self._store = store
        self._sessions = sessions
        sessions.finish = self.finish
        self._connections = connections
        connections.equip = self._equip
        self._templates = templates
        self._provisioning = provisioning
        self._packages = packages
        self._leases = leases
        self._background = background
        self._clock = clock
        self._node_id = node_id
        self._adding: dict[str, Install] = {}
        """What is being installed for sessions that run, by session."""

    # What there is

    async def get(self, session_id: str) -> Install:
        """As recorded; while more is being installed here, that."""
        session = await self._connections.session(session_id)
        none = Install((), 0, status=InstallStatus.INSTALLED)
        return self._adding.get(session_id) or session.install or none

    async def log(self, session_id: str) -> bytes:
        """What the last installation has printed so far."""
        session = await self._connections.session(session_id)
        self._connections.check_here(session)
        said, install = await self._packages.log(session_id), session.install
        if not said and install is not None and install.status is InstallStatus.INSTALLED:
            return b"atoll: Nothing had to be installed: they were on this node.\n"
        return said

    # At the creation

    async def finish(self, session: Session) -> Session:
        """
        Bring a session to run whose packages are being installed: by this replica, by another, or
        by one that is no more. An execution that comes meanwhile waits for the same.
        """
        try:
            return (await self._connections.get(session.id)).session
        except Conflict:
            raise  # It has ended.
        except AtollError as error:
            current = await self._sessions.get(session.id)
            if current.status is SessionStatus.CREATING and not isinstance(
                error, NOT_OF_THE_SESSION
            ):
                with contextlib.suppress(Conflict):
                    await self._sessions.end(
                        current, SessionStatus.FAILED, Cause.DRIVER, error.message
                    )
            raise

    async def _equip(self, session: Session) -> Session:
        """With its packages on this node, or without them if it said that it can do so."""
        if session.install is None:
            return session
        template = await self._template(session)
        if not is_installing(session):
            equipped = await self._provisioning.ensure_packages(session, template)
            return session if equipped == session else await self._store.sessions.save(equipped)
        session = await self._provisioning.installed(session, template)
        install = session.install
        assert install is not None
        if install.status is InstallStatus.FAILED:
            words = install.message or "Its packages could not be installed."
            if install.fail_on_error:
                await self._sessions.end(session, SessionStatus.FAILED, Cause.DEPENDENCY, words)
                raise DependencyFailed(words, session_id=session.id)
            warning = Warning("dependency_failed", words)
            session = dataclasses.replace(session, warnings=(*session.warnings, warning))
        now = self._clock.now()
        life = now + timedelta(seconds=session.timeout)
        return await self._store.sessions.save(
            dataclasses.replace(session, expires_at=life, updated_at=now)
        )

    async def _template(self, session: Session) -> Template:
        return await self._templates.numbered(session.template_id, session.template_version)

    # Later on

    async def add(
        self,
        session_id: str,
        dependencies: tuple[Dependency, ...],
        *,
        timeout: int,
        allow_conflicts: bool,
    ) -> Install:
        """
        Add to what a running session has; executions that begin after this find it. Of two at the
        same time one is refused.
        """
        session = await self._connections.usable(session_id)
        if session.status is SessionStatus.CREATING or session_id in self._adding:
            raise _in_progress(session_id)
        old = session.install
        kept = old.dependencies if old is not None and old.status is InstallStatus.INSTALLED else ()
        install = Install(
            dependencies=model.merged(kept, dependencies),
            timeout=timeout,
            fail_on_error=old is None or old.fail_on_error,
            allow_conflicts=allow_conflicts or (old is not None and old.allow_conflicts),
        )
        self._adding[session_id] = install
        try:
            lease = await self._leases.try_lease(f"dependencies:{session_id}")
            if lease is None:
                raise _in_progress(session_id)
            async with lease:
                template = await self._template(session)
                install = await self._packages.begin(install, template)
                if install.status is InstallStatus.INSTALLING:
                    install = await self._packages.install(session_id, install, template)
                if install.status is InstallStatus.FAILED:
                    raise DependencyFailed(
                        install.message or "The packages could not be installed.",
                        session_id=session_id,
                    )
                await self._record(session_id, install)
        finally:
            self._adding.pop(session_id, None)
        return install

    async def _record(self, session_id: str, install: Install) -> None:
        while True:
            session = await self._connections.usable(session_id)
            changed = dataclasses.replace(session, install=install, updated_at=self._clock.now())
            try:
                changed = await self._store.sessions.save(changed)
                break
            except Conflict:
                continue  # It moved on meanwhile, for another reason.
        await self._connections.announce(changed)


def _in_progress(session_id: str) -> Conflict:
    return Conflict(
        f"Packages of session {session_id} are being installed already; wait for their end.",
        code="install_in_progress",
    )
