"""
The Python packages of a session: what it has, the installation's log, and more packages later.

Executions find the packages that the session's record names. Packages that are added are installed
first and recorded then, so that a failure or a crash leaves the earlier set in place.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import Conflict, DependencyFailed
from atoll.model import packages as model
from atoll.model.install import Install, InstallStatus
from atoll.model.session import SessionStatus

if TYPE_CHECKING:
    from atoll.model.install import Dependency
    from atoll.model.session import Session
    from atoll.service.packages.service import Packages
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.provisioning import Provisioning


class Dependencies:
    def __init__(
        self,
        core: SessionCore,
        provisioning: Provisioning,
        packages: Packages,
    ) -> None:
        self._clock = core.replica.clock
        self._leases = core.replica.leases
        self._records = core.records
        self._connections = core.connections
        self._provisioning = provisioning
        self._packages = packages
        self._adding: dict[str, Install] = {}
        """Packages that are being added to running sessions, by session."""

    async def get(self, session_id: str) -> Install:
        """What is recorded, or what this replica is installing for the session."""
        session = await self._records.get(session_id)
        none = Install((), 0, status=InstallStatus.INSTALLED)
        return self._adding.get(session_id) or session.install or none

    async def log(self, session_id: str) -> bytes:
        """What the last installation has printed so far."""
        session = await self._records.get(session_id)
        self._records.check_here(session)
        printed, install = await self._packages.log(session_id), session.install
        if not printed and install is not None and install.status is InstallStatus.INSTALLED:
            return b"atoll: The node had all packages already; nothing was installed.\n"
        return printed

    async def add(
        self,
        session_id: str,
        dependencies: tuple[Dependency, ...],
        *,
        timeout: int,
        allow_conflicts: bool,
    ) -> Install:
        """
        Add packages to a running session; executions that begin after this find them. Of two calls
        at the same time one is refused.
        """
        session = await self._records.usable(session_id)
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
                install = await self._install(session, install)
                await self._record(session_id, install)
        finally:
            self._adding.pop(session_id, None)
        return install

    async def _install(self, session: Session, install: Install) -> Install:
        template = await self._provisioning.template_of(session)
        install = await self._packages.begin(install, template)
        if install.status is InstallStatus.INSTALLING:
            install = await self._packages.install(session.id, install, template)
        if install.status is InstallStatus.FAILED:
            raise DependencyFailed(
                install.message or "The packages could not be installed.", session_id=session.id
            )
        return install

    async def _record(self, session_id: str, install: Install) -> None:
        async def apply(session: Session) -> Session:
            return dataclasses.replace(session, install=install, updated_at=self._clock.now())

        await self._connections.announce(await self._records.change(session_id, apply))


def _in_progress(session_id: str) -> Conflict:
    return Conflict(
        f"Packages of session {session_id} are being installed. Try again when that is done.",
        code="install_in_progress",
    )
