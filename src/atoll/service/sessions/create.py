"""
Creates sessions: on a ready instance of the pool in one commit, or on an instance of their own.

A repeated request with the same id gets the session that the first one created.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.errors import (
    AlreadyExists,
    AtollError,
    Conflict,
    InstanceTaken,
    PermanentError,
    VersionConflict,
)
from atoll.model.event import session_event
from atoll.model.session import Cause, Session, SessionStatus, WorkspaceMode
from atoll.service.sessions.pausing_and_resizing import resize_instance
from atoll.service.sessions.provisioning import is_installing
from atoll.service.sessions.start import SPECIFIC_ERRORS

if TYPE_CHECKING:
    from atoll.model.resources import Resources
    from atoll.model.template import Template
    from atoll.service.instances import ReadyInstance
    from atoll.service.placement.admission import Admission
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.checkpoint_requests import CheckpointRequests
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.new_session import NewSession, SessionBuilder
    from atoll.service.sessions.start import SessionStarter

log = structlog.get_logger(__name__)


class SessionCreator:
    def __init__(
        self,
        core: SessionCore,
        builder: SessionBuilder,
        pool: Pool,
        admission: Admission,
        starter: SessionStarter,
        autosave: Autosave,
        checkpoint_requests: CheckpointRequests,
    ) -> None:
        self._replica = core.replica
        self._store = core.replica.store
        self._driver = core.driver
        self._records = core.records
        self._assignment = core.assignment
        self._observers = core.observers
        self._builder = builder
        self._pool = pool
        self._admission = admission
        self._starter = starter
        self._autosave = autosave
        self._checkpoint_requests = checkpoint_requests
        self.created = {"pool": 0, "cold": 0}
        """How many sessions this process has created, on an instance of the pool or their own."""

    async def create(
        self, new: NewSession, *, session_id: str | None = None, wait: bool = True
    ) -> Session:
        """
        A running session; the existing one if `session_id` is known. Without `wait`, a session
        whose packages have to be installed is returned before they are.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self.existing(known)
        session, template = await self._builder.build(new, session_id or ids.session_id())
        if self._store.unavailable:
            await self._store.ping()  # Check this before a ready instance is taken.
        session = self._autosave.with_warning(session)
        if session.started_from is not None:
            await self._checkpoint_requests.ensure(session.started_from)
        if _fits_pool(session):
            session_on_ready = await self._create_on_ready(session, template)
            if session_on_ready is not None:
                return session_on_ready
        return await self.create_cold(session, wait=wait)

    async def _create_on_ready(self, session: Session, template: Template) -> Session | None:
        """The session on an instance of the pool; None if that is impossible."""
        admitted = await self._admission.admit(session)
        try:
            ready = self._take(template, session.resources)
            if ready is None:
                return None
            if not await self._resize(ready, session.resources):
                return None  # The node cannot change the limits of an instance that runs.
            connection = await self._assignment.assign(session, ready, new=True)
        except AlreadyExists:
            return None  # Found again when it is created without the pool.
        except InstanceTaken as error:
            # Other replicas considered this one lost, and adopted its ready instances.
            log.warning("pool.instance_lost", session_id=session.id, error=error.message)
            return None
        finally:
            admitted()
        self.created["pool"] += 1
        return connection.session

    def _take(self, template: Template, resources: Resources) -> ReadyInstance | None:
        """A ready instance that has these limits or can get them."""
        if self._driver.resizing is None and resources != template.default_resources:
            return None
        return self._pool.take(template, resources)

    async def _resize(self, ready: ReadyInstance, resources: Resources) -> bool:
        """False if the limits could not be changed; then the instance is destroyed."""
        if ready.resources == resources:
            return True
        resized = False
        try:
            resized = await resize_instance(self._driver, ready.instance.handle, resources)
        finally:
            if not resized:
                self._replica.background.start(
                    self._pool.destroy(ready), f"destroy {ready.instance.id}"
                )
        return resized

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
            connection = await self._starter.start_new(session)
            self.created["cold"] += 1
            return connection.session
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
            connection = await self._starter.connect(session.id)
            self.created["cold"] += 1
            return connection.session
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
