"""
Gives a session its secrets, volumes and Python packages.

A session that asks for none of them costs nothing here.
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
    from atoll.service.templates.service import Templates
    from atoll.service.volumes.service import Volumes


def is_installing(session: Session) -> bool:
    install = session.install
    return install is not None and install.status is InstallStatus.INSTALLING


@dataclass(frozen=True, slots=True)
class Extras:
    """What a new session asks for besides its limits; secrets in plain text."""

    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    volumes: tuple[VolumeMount, ...] = ()
    workspace_mode: WorkspaceMode = WorkspaceMode.SYNC
    durability: Durability = Durability.BACKGROUND
    started_from: str | None = None
    install: Install | None = None


NO_EXTRAS = Extras()


class Provisioning:
    def __init__(
        self, secrets: Secrets, volumes: Volumes, packages: Packages, templates: Templates
    ) -> None:
        self._secrets = secrets
        self._volumes = volumes
        self._packages = packages
        self._templates = templates

    async def provide(self, session: Session, template: Template, extras: Extras) -> Session:
        """
        The session with its extras, checked and sealed. Packages that the node does not have are
        left to be installed by `install_packages`.
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

    async def install_packages(self, session: Session) -> Session:
        """The session with its packages installed, or with the reason why they are not."""
        install = session.install
        if install is None or install.status is not InstallStatus.INSTALLING:
            return session
        template = await self.template_of(session)
        done = await self._packages.install(session.id, install, template)
        return dataclasses.replace(session, install=done)

    async def ensure_packages(self, session: Session) -> Session:
        """Install a session's packages again where this node does not have them."""
        if session.install is None:
            return session
        template = await self.template_of(session)
        install = await self._packages.ensure(session.id, session.install, template)
        return dataclasses.replace(session, install=install)

    async def template_of(self, session: Session) -> Template:
        return await self._templates.numbered(session.template_id, session.template_version)

    def package_variables(self, session: Session) -> dict[str, str]:
        """The environment variables by which code finds the session's packages."""
        install = session.install
        if install is None or install.environment is None:
            return {}
        return self._packages.added({}, install.environment)

    async def prepare_variables(self, session: Session) -> None:
        """To be awaited before `variables`: the cipher is loaded in a thread."""
        await self._secrets.prepare(session)

    def variables(self, session: Session) -> dict[str, str]:
        """
        The environment variables of everything that runs in the session: its own, secrets, and
        those of packages. Raises `PermanentError` with code `secret_unreadable`.
        """
        if session.install is None and not session.secrets:
            return session.env_vars
        own = {**session.env_vars, **self._secrets.reveal(session)}
        if session.install is not None and session.install.environment is not None:
            own = self._packages.added(own, session.install.environment)
        return own
