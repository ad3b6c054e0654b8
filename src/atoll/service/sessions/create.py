"""
Creates sessions: on a ready instance of the pool in one commit, or on an instance of their own.

A repeated request with the same id gets the session that the first one created.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.errors import (
    AlreadyExists,
    AtollError,
    Conflict,
    InstanceTaken,
    InvalidRequest,
    PermanentError,
    TemporaryError,
    VersionConflict,
)
from atoll.model.event import session_event
from atoll.model.session import Cause, Session, SessionStatus, Wanted, WorkspaceMode
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.sessions.optional_parts import resize_instance
from atoll.service.sessions.provisioning import NO_EXTRAS, Extras, is_installing
from atoll.service.sessions.start import SPECIFIC_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.model.resources import Resources
    from atoll.model.template import Template
    from atoll.service.instances import ReadyInstance
    from atoll.service.placement.admission import Admission
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.checkpoint_requests import CheckpointRequests
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.service.sessions.start import SessionStarter
    from atoll.service.templates.service import Templates
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

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


@dataclasses.dataclass(frozen=True)
class Compute:
    """What sessions are created on."""

    pool: Pool
    templates: Templates
    admission: Admission
    provisioning: Provisioning


class SessionCreator:
    def __init__(
        self,
        core: SessionCore,
        compute: Compute,
        starter: SessionStarter,
        autosave: Autosave,
        checkpoint_requests: CheckpointRequests,
        settings: Settings,
    ) -> None:
        self._replica = core.replica
        self._store = core.replica.store
        self._clock = core.replica.clock
        self._driver = core.driver
        self._records = core.records
        self._assignment = core.assignment
        self._observers = core.observers
        self._pool = compute.pool
        self._templates = compute.templates
        self._admission = compute.admission
        self._provisioning = compute.provisioning
        self._starter = starter
        self._autosave = autosave
        self._checkpoint_requests = checkpoint_requests
        self._settings = settings
        self.warm_starts = 0
        """Sessions that were created on an instance of the pool."""

    async def create(
        self, new: NewSession, *, session_id: str | None = None, wait: bool = True
    ) -> Session:
        """
        A running session; the existing one if `session_id` is known. Without `wait`, a session
        whose packages have to be installed is returned before they are.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self.existing(known)
        template = await self._templates.ready(new.template_id or DEFAULT_TEMPLATE)
        session = await self._session(new, template, session_id or ids.session_id())
        if self._store.unavailable:
            await self._store.ping()  # Check this before a ready instance is taken.
        session = self._autosave.with_warning(session)
        if new.extras is not NO_EXTRAS:
            session = await self._provided(session, template, new.extras)
        if _fits_pool(session):
            session_on_ready = await self._create_on_ready(session, template)
            if session_on_ready is not None:
                return session_on_ready
        return await self.create_cold(session, wait=wait)

    async def _session(self, new: NewSession, template: Template, session_id: str) -> Session:
        resources = new.limits(template.default_resources)
        if resources is not template.default_resources:
            await self._templates.check_resources(resources)
        seconds = self.lifetime(new.timeout)
        now = self._clock.now()
        session = Session(
            id=session_id,
            template_id=template.id,
            template_version=template.number,
            status=SessionStatus.CREATING,
            wanted=Wanted.RUNNING,
            runtime_type=self._driver.kind,
            runtime_node=self._replica.node_id,
            resources=resources,
            timeout=seconds,
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(seconds=seconds),
            env_vars={**template.env, **new.env_vars},
            active_at=now,
        )
        timers = {
            name: _timer(new.fields.get(name), getattr(self._settings.session, name))
            for name in TIMERS
        }
        session = dataclasses.replace(session, **{**new.fields, **timers})
        if session.capacity > MAX_CAPACITY:
            raise InvalidRequest(f"capacity: at most {MAX_CAPACITY}.", field="capacity")
        return session

    def lifetime(self, timeout: int | None) -> int:
        limit = self._settings.session.max_timeout.total_seconds()
        seconds = timeout or int(self._settings.session.timeout.total_seconds())
        if seconds > limit:
            raise InvalidRequest(
                f"timeout: at most {limit:g} seconds are allowed here.", field="timeout"
            )
        return seconds

    async def _provided(self, session: Session, template: Template, extras: Extras) -> Session:
        if extras.started_from is not None:
            await self._checkpoint_requests.ensure(extras.started_from)
        session = await self._provisioning.provide(session, template, extras)
        if is_installing(session) and extras.install is not None:
            # Its lifetime begins when they are installed.
            later = session.expires_at + timedelta(seconds=extras.install.timeout)
            session = dataclasses.replace(session, expires_at=later)
        return session

    async def _create_on_ready(self, session: Session, template: Template) -> Session | None:
        """The session on an instance of the pool; None if that is impossible."""
        admitted = await self._admission.admit(session)
        try:
            ready = self._pool.take(template, session.resources)
            if ready is None:
                return None
            await self._resize(ready, session.resources)
            connection = await self._assignment.assign(session, ready, new=True)
        except AlreadyExists:
            return None  # Found again when it is created without the pool.
        except InstanceTaken as error:
            # Other replicas considered this one lost, and adopted its ready instances.
            log.warning("pool.instance_lost", session_id=session.id, error=error.message)
            return None
        finally:
            admitted()
        self.warm_starts += 1
        return connection.session

    async def _resize(self, ready: ReadyInstance, resources: Resources) -> None:
        if ready.resources == resources:
            return
        handle = ready.instance.handle
        try:
            if not await resize_instance(self._driver, handle, resources):
                raise TemporaryError(
                    f"The limits of instance {handle.instance_id} could not be changed."
                )
        except BaseException:
            self._replica.background.start(
                self._pool.destroy(ready), f"destroy {ready.instance.id}"
            )
            raise

    async def create_cold(self, session: Session, *, wait: bool = True) -> Session:
        """Record a new session, and make an instance for it."""
        admitted = await self._admission.admit(session)
        try:
            event = session_event(session, session.created_at, "created")
            await self._store.sessions.add(session, event=event)
        except AlreadyExists:
            known = await self._store.sessions.get(session.id)
            if known is None:
                raise
            # A replica that was considered lost handled the same request, and was faster.
            return await self.existing(known)
        finally:
            admitted()
        if not is_installing(session):
            return (await self._starter.start_new(session)).session
        # The client may disconnect: an installation takes minutes, and its progress can be
        # requested.
        self._observers.session_changed(session)
        starting = self._replica.background.start(
            self._start_after_installation(session), f"start {session.id}"
        )
        return await asyncio.shield(starting) if wait else session

    async def _start_after_installation(self, session: Session) -> Session:
        """
        Wait until the session runs, whichever replica installs its packages and starts it; an
        execution that comes meanwhile waits for the same.
        """
        try:
            return (await self._starter.connect(session.id)).session
        except (Conflict, *SPECIFIC_ERRORS):
            raise
        except AtollError as error:
            current = await self._records.get(session.id)
            if current.status is SessionStatus.CREATING:
                with contextlib.suppress(VersionConflict):
                    await self._records.end(
                        current, SessionStatus.FAILED, Cause.DRIVER, error.message
                    )
            raise

    async def existing(self, session: Session) -> Session:
        """The session of an earlier request that got no answer."""
        if session.status is SessionStatus.FAILED:
            raise PermanentError(
                session.message or f"Session {session.id} could not be created.",
                code="session_failed",
            )
        if session.status.ended or not self._records.is_here(session):
            return session  # The API forwards the next request to its node.
        return (await self._starter.connect(session.id)).session


def _fits_pool(session: Session) -> bool:
    """Whether the session can use a ready instance of the pool."""
    return (
        not session.volumes
        and session.workspace_mode is WorkspaceMode.SYNC
        and session.started_from is None
        and not is_installing(session)
    )


def _timer(requested: int | None, default: timedelta | None) -> int | None:
    if requested is None:
        return None if default is None else max(1, int(default.total_seconds()))
    return requested or None
