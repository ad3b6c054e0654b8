"""
Connects to a session: over the existing connection, or to a new instance.

An instance that has died is replaced in the same session, with its workspace, by the next request
that needs it. A stopped, paused or archived session is started by a request unless `auto_start` is
off or the request's key may only read. Requests that come at the same time share one start, also
over several replicas: it needs the lease of the session's instance.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    AtollError,
    BackendUnavailable,
    CheckpointDamaged,
    DependencyFailed,
    InstanceTaken,
    NodeFull,
    NodeUnreachable,
    PermanentError,
    SessionNotReady,
    SessionNotRunning,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import ProtocolViolation
from atoll.model.install import InstallStatus
from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning
from atoll.model.session_changes import (
    REPLACED,
    as_running,
    starting_again,
    wanting,
    with_warnings,
    without_instance,
)
from atoll.service.sessions.provisioning import is_installing
from atoll.service.sessions.records import instance_lease, not_running

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.service.placement.admission import Admission
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.service.sessions.stop import InstanceStopper

log = structlog.get_logger(__name__)

SPECIFIC_ERRORS = (
    BackendUnavailable,
    NodeFull,
    NodeUnreachable,
    DependencyFailed,
    CheckpointDamaged,
    ProtocolViolation,
)
"""Errors of a start that give a client more detail than that the session is not ready."""
may_start: ContextVar[bool] = ContextVar("may_start", default=True)
"""Whether the present request may start a session; not if its key may only read."""


class SessionStarter:
    def __init__(
        self,
        core: SessionCore,
        stopper: InstanceStopper,
        provisioning: Provisioning,
        admission: Admission,
    ) -> None:
        self._replica = core.replica
        self._clock = core.replica.clock
        self._records = core.records
        self._instances = core.instances
        self._connections = core.connections
        self._assignment = core.assignment
        self._observers = core.observers
        self._stopper = stopper
        self._provisioning = provisioning
        self._admission = admission
        self._shared_starts: dict[str, tuple[asyncio.Future[Connection], datetime | None]] = {}
        """Starts in progress, each with the submission time of the execution that caused it."""

    async def connect(self, session_id: str, *, submitted_at: datetime | None = None) -> Connection:
        """
        A connection to the running session, which is started or recovered first if need be. For an
        execution, `submitted_at` decides whether a stop that came later keeps it from starting.
        """
        connection = await self._connections.probe(session_id)
        if connection is not None:
            self._observers.session_used(connection.session)
            return connection
        if submitted_at is None and not may_start.get():
            session = await self._records.unended(session_id)
            if session.wanted is not Wanted.RUNNING:
                raise not_running(session, "Start it with a key that may do more than read.")
        while True:
            shared = self._shared_starts.get(session_id)
            # One that is done is about to be removed; awaiting it again would not even yield.
            if shared is None or shared[0].done():
                shared = self._begin_start(session_id, submitted_at)
            start, begun_for = shared
            try:
                return await asyncio.shield(start)
            except SessionNotRunning:
                if submitted_at is not None or begun_for is None:
                    raise
                # Refused to an older execution; this request may start the session.

    def _begin_start(
        self, session_id: str, submitted_at: datetime | None
    ) -> tuple[asyncio.Future[Connection], datetime | None]:
        task = self._replica.background.start(
            self._connect_or_start(session_id, submitted_at), f"start {session_id}"
        )
        shared = self._shared_starts[session_id] = task, submitted_at

        def forget(_: asyncio.Future[Connection]) -> None:
            if self._shared_starts.get(session_id) is shared:
                del self._shared_starts[session_id]

        task.add_done_callback(forget)
        return shared

    async def _connect_or_start(self, session_id: str, submitted_at: datetime | None) -> Connection:
        try:
            session = await self._record_wanted(session_id, submitted_at)
            self._observers.session_used(session)
            if session.status in (SessionStatus.CREATING, SessionStatus.RUNNING):
                connection = await self._connections.open_recorded(session)
                if connection is not None:
                    return connection
            owner = f"{self._replica.id}/{session_id}"
            async with self._replica.leases.lease(instance_lease(session_id), owner):
                # Another replica may have been faster.
                return await self._start(await self._record_wanted(session_id, submitted_at))
        except SPECIFIC_ERRORS:
            raise
        except (PermanentError, TemporaryError) as error:
            raise SessionNotReady(f"Session {session_id} is not ready: {error.message}") from error

    async def startable(self, session_id: str) -> Session:
        """A session that runs, or that a request may start on this node."""
        session = await self._records.usable(session_id)
        if session.wanted is not Wanted.RUNNING and not session.auto_start:
            raise not_running(session)
        if session.rested_at is not None:
            # Refused at once, so that another node can be asked.
            await self._admission.readmit(session)
        return session

    async def start(self, session_id: str) -> Connection:
        """Start the session if it does not run. The caller holds the lease of its instance."""
        return await self._start(await self._records.unended(session_id))

    async def start_new(self, session: Session) -> Connection:
        """Make the first instance of a recorded session; a failure ends the session."""
        # Under the lease: a replica that finds the session unfinished would start it as well.
        leases = self._replica.leases
        async with leases.lease(instance_lease(session.id), leases.new_owner()):
            try:
                ready = await self._instances.make(session)
            except AtollError as error:
                await self._records.end(session, SessionStatus.FAILED, Cause.DRIVER, error.message)
                raise
            except BaseException:
                # Cancelled, or a defect here: nothing else would end the session.
                message = "The creation of the session was interrupted."
                ending = self._records.end(session, SessionStatus.FAILED, Cause.DRIVER, message)
                self._replica.background.start(ending, f"end {session.id}")
                raise
            try:
                connection = await self._assignment.assign(session, ready)
            except (VersionConflict, InstanceTaken):
                # The session ended or changed meanwhile, or a replica that considered this one lost
                # has also made an instance.
                return await self.start(session.id)
            log.debug("session.started", session_id=session.id, instance_id=ready.instance.id)
            return connection

    async def _start(self, session: Session) -> Connection:
        """Connect to the instance that the session has, or make another one."""
        if session.status is SessionStatus.STOPPING:
            session = await self._stopper.stop(session)
            self._connections.disconnect(session.id)
        connection = None
        if session.status.keeps_instance:
            connection = await self._connections.open_recorded(session, resume=True)
        if connection is not None:
            if session.status is not SessionStatus.RUNNING:
                running = as_running(session, self._clock.now())
                self._connections.update(connection, await self._records.save(running))
            return connection
        if session.rested_at is not None:
            await self._admission.readmit(session)
        try:
            session = await self._with_new_lifetime(await self._without_instance(session))
            session = await self._with_packages(session)
            return await self._assignment.assign(session, await self._instances.make(session))
        except (VersionConflict, InstanceTaken):
            # Ended meanwhile, or the replica that was making an instance has finished.
            connection = await self._connections.open_recorded(
                await self._records.unended(session.id)
            )
            if connection is None:
                raise
            return connection

    async def _record_wanted(self, session_id: str, submitted_at: datetime | None) -> Session:
        """Record that the session is wanted to run, if the request may start it."""
        while True:
            session = await self._records.unended(session_id)
            if session.wanted is Wanted.RUNNING:
                return session
            if not _request_may_start(session, submitted_at):
                raise not_running(session)
            self._records.check_here(session)
            running = wanting(session, Wanted.RUNNING, session.cause, self._clock.now())
            try:
                return await self._records.save_silently(running)
            except VersionConflict:
                continue

    async def _without_instance(self, session: Session) -> Session:
        """Record that the instance is lost, and why, then remove what is left of it."""
        lost = session.instance_id
        if lost is None:
            return session
        observed = await self._instances.end_of(session)
        log.warning(
            "session.instance_lost",
            session_id=session.id,
            instance_id=lost,
            cause=observed.cause,
            message=observed.message,
        )
        if observed.message is not None:
            session = with_warnings(session, Warning(REPLACED, observed.message))
        session = await self._records.save(without_instance(session, self._clock.now()))
        await self._instances.remove(lost)
        return session

    async def _with_new_lifetime(self, session: Session) -> Session:
        """Record that a stopped or archived session is starting."""
        if session.rested_at is None:
            return session
        return await self._records.save(starting_again(session, self._clock.now()))

    async def _with_packages(self, session: Session) -> Session:
        """
        Install the session's packages on this node, if they are not there. One whose packages
        cannot be installed ends, or goes on with a warning if it asked for that.
        """
        if session.install is None:
            return session
        if not is_installing(session):
            equipped = await self._provisioning.ensure_packages(session)
            if equipped == session:
                return session
            return await self._records.save_silently(equipped)
        session = await self._provisioning.install_packages(session)
        install = session.install
        if install is not None and install.status is InstallStatus.FAILED:
            message = install.message or "The packages of the session could not be installed."
            if install.fail_on_error:
                await self._records.end(session, SessionStatus.FAILED, Cause.DEPENDENCY, message)
                raise DependencyFailed(message, session_id=session.id)
            warning = Warning("dependency_failed", message)
            session = dataclasses.replace(session, warnings=(*session.warnings, warning))
        now = self._clock.now()
        expires_at = now + timedelta(seconds=session.timeout)
        return await self._records.save_silently(
            dataclasses.replace(session, expires_at=expires_at, updated_at=now)
        )


def _request_may_start(session: Session, submitted_at: datetime | None) -> bool:
    """Whether a request, or an execution that was submitted then, may start the session."""
    runs = session.rested_at is None
    if submitted_at is not None and (runs or session.stopped_since(submitted_at)):
        # The session ran when the execution was accepted. A stop by a user applies to the execution
        # too. A paused session is resumed, and a stop by the idle timer is reversed, because the
        # session was not idle.
        return runs or session.cause is Cause.IDLE
    return session.auto_start
