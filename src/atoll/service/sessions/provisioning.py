"""
What a session is given beside its limits, before anything runs in it.

A session that asks for none of it costs nothing here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.model.install import InstallStatus
from atoll.model.session import Durability, WorkspaceMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.install import Install
    from atoll.model.session import Session
    from atoll.model.template import Template
    from atoll.model.volume import VolumeMount
    from atoll.service.packages.service import Packages
    from atoll.service.sessions.secrets import Secrets
    from atoll.service.volumes.service import Volumes


@dataclass(frozen=True, slots=True)
class Extras:
    """What is asked for; secrets as they came."""

    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    volumes: tuple[VolumeMount, ...] = ()
    workspace_mode: WorkspaceMode = WorkspaceMode.SYNC
    durability: Durability = Durability.BACKGROUND
    started_from: str | None = None
    install: Install | None = None


NOTHING = Extras()


class Provisioning:
    def __init__(self, secrets: Secrets, volumes: Volumes, packages: Packages) -> None:
        self._secrets = secrets
        self._volumes = volumes
        self._packages = packages

    async def granted(self, session: Session, template: Template, extras: Extras) -> Session:
        """
        The session with what it asked for, checked and put down in it; packages that are not in the
        cache are left `installing`, for `installed` to see to.
        """
        await self._volumes.check(extras.volumes, extras.workspace_mode)
        install = extras.install
        if install is not None:
            install = await self._packages.begin(install, template)
        session = await self._secrets.seal(session, extras.secrets)
        return dataclasses.replace(
            session,
            volumes=extras.volumes,
            workspace_mode=extras.workspace_mode,
            durability=extras.durability,
            started_from=extras.started_from,
            install=install,
        )

    async def installed(self, session: Session, template: Template) -> Session:
        """The session with its packages installed, or with why they could not be."""
        install = session.install
        if install is None or install.status is not InstallStatus.INSTALLING:
            return session
        done = await self._packages.install(session.id, install, template)
        return dataclasses.replace(session, install=done)

    async def ensure_packages(self, session: Session, template: Template) -> Session:
        """Make a session's packages again where this node does not have them."""
        if session.install is None:
            return session
        install = await self._packages.ensure(session.id, session.install, template)
        return dataclasses.replace(session, install=install)

    def packages(self, session: Session) -> dict[str, str]:
        """The variables by which code finds the session's packages alone."""
        install = session.install
        if install is None or install.environment is None:
            return {}
        return self._packages.added({}, install.environment)

    async def ready(self, session: Session) -> None:
        """Before `variables`: what takes time the first time is done in a thread."""
        await self._secrets.ready(session)

    def variables(self, session: Session) -> dict[str, str]:
        """
        The variables that everything in the session gets: its own, secrets, and packages. Raises
        `PermanentError` with code `secret_unreadable`.
        """
        if session.install is None and not session.secrets:
            return session.env_vars
        own = {**session.env_vars, **self._secrets.reveal(session)}
        if session.install is not None and session.install.environment is not None:
            own = self._packages.added(own, session.install.environment)
        return own
