"""
Makes the record of a new session from what a client has requested: checks it, and adds the values
of its template and of the settings.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from atoll.errors import InvalidRequest
from atoll.model.session import Session, SessionStatus, Wanted
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.sessions.provisioning import NO_EXTRAS, Extras, is_installing

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.model.resources import Resources
    from atoll.model.template import Template
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.service.templates.service import Templates
    from atoll.settings import SessionSettings

MAX_CAPACITY = 64
"""Executions that a session may run at the same time."""
TIMERS = ("idle_timeout", "archive_after", "delete_after")
"""Fields of a session that settings have a default for; 0 in a request disables them."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewSession:
    """A request for a session."""

    limits: Callable[[Resources], Resources]
    """Given the template's resources, those of the session."""
    template_id: str | None = None
    timeout: int | None = None
    env_vars: dict[str, str] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of `Session`, by name, as requested."""
    extras: Extras = NO_EXTRAS


class SessionBuilder:
    def __init__(
        self,
        core: SessionCore,
        templates: Templates,
        provisioning: Provisioning,
        settings: SessionSettings,
    ) -> None:
        self._clock = core.replica.clock
        self._node_id = core.replica.node_id
        self._driver = core.driver
        self._templates = templates
        self._provisioning = provisioning
        self._settings = settings

    async def build(self, new: NewSession, session_id: str) -> tuple[Session, Template]:
        """The session, which is not recorded yet, and its template."""
        template = await self._templates.ready(new.template_id or DEFAULT_TEMPLATE)
        session = await self._session(new, template, session_id)
        if new.extras is not NO_EXTRAS:
            session = await self._provide(session, template, new.extras)
        return session, template

    async def _session(self, new: NewSession, template: Template, session_id: str) -> Session:
        resources = new.limits(template.default_resources)
        if resources is not template.default_resources:
            await self._templates.check_resources(resources)
        seconds = self.lifetime(new.timeout)
        now = self._clock.now()
        timers = {
            name: _timer(new.fields.get(name), getattr(self._settings, name)) for name in TIMERS
        }
        session = Session(
            id=session_id,
            template_id=template.id,
            template_version=template.number,
            status=SessionStatus.CREATING,
            wanted=Wanted.RUNNING,
            runtime_type=self._driver.kind,
            runtime_node=self._node_id,
            resources=resources,
            timeout=seconds,
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(seconds=seconds),
            env_vars={**template.env, **new.env_vars},
            active_at=now,
            **{**new.fields, **timers},
        )
        if session.capacity > MAX_CAPACITY:
            raise InvalidRequest(f"capacity: at most {MAX_CAPACITY}.", field="capacity")
        return session

    def lifetime(self, timeout: int | None) -> int:
        """The requested or default lifetime in seconds."""
        limit = self._settings.max_timeout.total_seconds()
        seconds = timeout or int(self._settings.timeout.total_seconds())
        if seconds > limit:
            raise InvalidRequest(
                f"timeout: at most {limit:g} seconds are allowed here.", field="timeout"
            )
        return seconds

    async def _provide(self, session: Session, template: Template, extras: Extras) -> Session:
        session = await self._provisioning.provide(session, template, extras)
        if is_installing(session) and extras.install is not None:
            # Its lifetime begins when they are installed.
            later = session.expires_at + timedelta(seconds=extras.install.timeout)
            session = dataclasses.replace(session, expires_at=later)
        return session


def _timer(requested: int | None, default: timedelta | None) -> int | None:
    if requested is None:
        return None if default is None else max(1, int(default.total_seconds()))
    return requested or None
