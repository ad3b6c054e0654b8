"""Changes existing sessions: limits, lifetime, variables, labels and other fields."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, InvalidRequest
from atoll.service.sessions.pausing_and_resizing import resize_instance

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.model.resources import Resources
    from atoll.model.session import Session
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.new_session import SessionBuilder
    from atoll.service.templates.service import Templates

MAX_ENTRIES = {"env_vars": 256, "labels": 64}
"""How many entries these fields of a session may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionChange:
    """The requested changes of a session."""

    limits: Callable[[Resources], Resources]
    timeout: int | None = None
    """Seconds of life from now on."""
    env_vars: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """By name; null removes a variable."""
    labels: dict[str, str | None] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of `Session`, by name."""


class SessionUpdater:
    def __init__(
        self,
        core: SessionCore,
        templates: Templates,
        builder: SessionBuilder,
    ) -> None:
        self._clock = core.replica.clock
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._connections = core.connections
        self._observers = core.observers
        self._templates = templates
        self._builder = builder

    async def update(self, session_id: str, change: SessionChange) -> Session:
        """Change a session; executions that begin after this use the new values."""

        async def apply(session: Session) -> Session:
            return await self.changed(session, change)

        session = await self._records.change(session_id, apply, event="updated")
        self._observers.session_changed(session)
        await self._connections.announce(session)
        return session

    async def changed(self, session: Session, change: SessionChange) -> Session:
        """The changed session; the limits of its instance are set already."""
        now = self._clock.now()
        fields: dict[str, Any] = dict(change.fields)
        if change.timeout is not None:
            seconds = self._builder.lifetime(change.timeout)
            fields |= {"timeout": seconds, "expires_at": now + timedelta(seconds=seconds)}
        for name, values in (("env_vars", change.env_vars), ("labels", change.labels)):
            if values:
                merged = {**getattr(session, name), **values}
                fields[name] = {key: value for key, value in merged.items() if value is not None}
                if len(fields[name]) > MAX_ENTRIES[name]:
                    raise InvalidRequest(f"{name}: at most {MAX_ENTRIES[name]} in all.", field=name)
        if both := sorted(fields.get("env_vars", {}).keys() & session.secrets.keys()):
            raise InvalidRequest(
                f"env_vars.{both[0]}: a secret has this name. Remove the secret first.",
                field="env_vars",
            )
        resources = change.limits(session.resources)
        if resources != session.resources:
            await self._templates.check_resources(resources)
            await self._resize(session, resources)
            fields["resources"] = resources
        return dataclasses.replace(session, **fields, updated_at=now)

    async def _resize(self, session: Session, resources: Resources) -> None:
        """Set the limits of the session's instance; its next one starts with them."""
        if session.workspace is not None and resources.disk != session.resources.disk:
            raise Conflict(
                f"The disk size of session {session.id} is fixed while its workspace is on a node. "
                "Archive the session, change the size, and start it again.",
                code="disk_fixed",
            )
        instance = await self._instances.of(session)
        if instance is not None and not await resize_instance(
            self._driver, instance.handle, resources
        ):
            raise Conflict(
                f"The limits of session {session.id} cannot be changed while it runs. Stop it "
                "first.",
                code="resize_unavailable",
            )
