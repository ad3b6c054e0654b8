"""
Takes the steps of `model/plan.py` until a session is in its wanted state.

Only the owner of the lease of the session's instance takes them. A step may be cut off anywhere,
also by a crash, and is repeated from what is recorded by then: what is removed is recorded as gone
first, or found by the orphan sweep.

A failed step is repeated after a pause that doubles. After some failures, or at once if repeating
is useless, the session gets the status `error` with the cause. It is checked regularly, and
recovers when its real state allows it. A session that never ran fails instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    AlreadyExists,
    AtollError,
    CoordinationUnavailable,
    DatabaseUnavailable,
    InstanceTaken,
    LeaseLost,
    NodeUnreachable,
    PermanentError,
    SessionEnded,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import ExecutorError
from atoll.model import plan
from atoll.model.instance import State
from atoll.model.plan import Step
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.model.session_changes import cleared, pause_cancelled, with_status
from atoll.service.sessions.archive import SLOT_PAUSE, NoArchiveSlot
from atoll.service.sessions.observers import SessionObserver
from atoll.service.sessions.pausing_and_resizing import require_pausing
from atoll.service.sessions.records import instance_lease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.coordination.leases import Lease
    from atoll.model.instance import Instance
    from atoll.model.node import Node
    from atoll.service.sessions.archive import Archiver
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.start import SessionStarter
    from atoll.service.sessions.stop import InstanceStopper
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

MAX_STEPS = 20
"""More steps than any way through the plan's table has."""
RETRY_BACKOFF = 1.0
"""Seconds before a failed step is repeated; they double with each failure, up to `MAX_PAUSE`."""
MAX_PAUSE = timedelta(minutes=1)
ERROR_RETRY = 60.0
"""Seconds between two tries of a session in `error`."""
EXTERNAL_ERRORS = (DatabaseUnavailable, CoordinationUnavailable, LeaseLost, NodeUnreachable)
"""Errors that are not the session's: the step is repeated, and not counted as a failure."""

LOST_RACES = (VersionConflict, AlreadyExists, InstanceTaken, SessionEnded)
"""Errors of a step while another request or replica changed the session: no failures either."""


class Transitions(SessionObserver):
    def __init__(
        self,
        core: SessionCore,
        starter: SessionStarter,
        stopper: InstanceStopper,
        archiver: Archiver,
        autosave: Autosave,
        settings: Settings,
    ) -> None:
        self._replica = core.replica
        self._clock = core.replica.clock
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._connections = core.connections
        self._observers = core.observers
        self._starter = starter
        self._stopper = stopper
        self._archiver = archiver
        self._autosave = autosave
        self._settings = settings.session
        self._archive = settings.archive
        self._clearing: set[str] = set()
        self._handlers: dict[Step, Callable[[Session], Awaitable[None]]] = {
            Step.START: self._start,
            Step.RESUME: self._start,
            Step.PAUSE: self._freeze,
            Step.STOP: self._stop,
            Step.ARCHIVE: self._move_to_archive,
            Step.HEAL: self._heal,
            Step.CLEAR: self._clear,
        }
        core.observers.subscribe(self)

    async def settle(self, session_id: str, *, wait: bool = True) -> Session | None:
        """
        Bring a session of this node to its wanted state, as far as possible. Without `wait`, None
        if another owner has the session's lease and does the same. A failure is recorded and
        raised.
        """
        key, owner = instance_lease(session_id), self._replica.leases.new_owner()
        lease: Lease | None = self._replica.leases.lease(key, owner)
        if not wait:
            lease = await self._replica.leases.try_lease(key, owner)
        if lease is None:
            return None
        async with lease:
            for _ in range(MAX_STEPS):
                session = await self._records.get(session_id)
                if not self._records.is_here(session):
                    return session
                step = plan.next_step(session)
                if step is Step.NONE:
                    return session
                await self._take(step, session)
        raise PermanentError(
            f"Session {session_id} did not reach its wanted state.", code="session_unsettled"
        )

    async def _take(self, step: Step, session: Session) -> None:
        try:
            await self._handlers[step](session)
        except LOST_RACES as error:
            # The next step follows from the new record.
            log.info("session.changed", session_id=session.id, step=step, error=error.message)
        except NoArchiveSlot:
            await self._postpone(session, SLOT_PAUSE)
            raise TemporaryError(
                f"Session {session.id} waits for other sessions to be archived.",
                code="archive_busy",
            ) from None
        except EXTERNAL_ERRORS:
            raise
        except AtollError as error:
            await self._record_failure(session.id, step, error)
            raise

    # Failures

    async def _postpone(self, session: Session, pause: timedelta) -> None:
        retry_at = self._clock.now() + pause
        with contextlib.suppress(VersionConflict):
            await self._records.save_silently(dataclasses.replace(session, retry_at=retry_at))
        self._observers.settling_delayed(session.id, pause.total_seconds())

    async def _record_failure(self, session_id: str, step: Step, error: AtollError) -> None:
        session = await self._records.get(session_id)
        if plan.next_step(session) is Step.NONE or (
            session.status.ended and step is not Step.CLEAR
        ):
            return
        permanent = isinstance(error, PermanentError)
        cause = Cause(error.cause) if isinstance(error, PermanentError) else Cause.DRIVER
        if session.status is SessionStatus.CREATING:
            with contextlib.suppress(VersionConflict):
                await self._records.end(session, SessionStatus.FAILED, cause, error.message)
            return
        now, failures = self._clock.now(), session.failures + 1
        changed = dataclasses.replace(
            session,
            failures=failures,
            retry_at=now + retry_delay(failures),
            message=error.message,
            updated_at=now,
        )
        retries = self._archive.retries if step is Step.ARCHIVE else self._settings.retries
        gives_up = not session.status.ended and (permanent or failures > retries)
        if gives_up:
            changed = dataclasses.replace(
                changed,
                status=SessionStatus.ERROR,
                cause=cause,
                retry_at=now + timedelta(seconds=ERROR_RETRY),
            )
        log.warning(
            "session.step_failed",
            session_id=session.id,
            step=step,
            failures=failures,
            code=error.code,
            error=error.message,
        )
        with contextlib.suppress(VersionConflict):
            await (self._records.save if gives_up else self._records.save_silently)(changed)
        assert changed.retry_at is not None
        self._observers.settling_delayed(session.id, (changed.retry_at - now).total_seconds())

    # Steps

    async def _start(self, session: Session) -> None:
        await self._starter.start(session.id)

    async def _freeze(self, session: Session) -> None:
        instance = await self._instances.of(session)
        if instance is None or not await self._instances.ensure_unpaused(instance):
            # There is no memory left that a pause would keep.
            await self._starter.start(session.id)
            return
        pausing = require_pausing(self._driver)
        if session.status is not SessionStatus.PAUSING:
            session = await self._become(session, SessionStatus.PAUSING)
        link = await self._driver.connect(instance.handle)
        try:
            with contextlib.suppress(ExecutorError):  # The executor is older than these requests.
                # Other replicas have to look at the session before they use it again.
                await link.call("detach")
                # The workspace of a paused session can be copied.
                await link.call("sync")
            if any(not run["ended"] for run in link.hello["runs"]):
                # An execution started before the pause was complete.
                await self._records.save(pause_cancelled(session, self._clock.now()))
                return
        finally:
            link.close()
        self._connections.disconnect(session.id)
        await pausing.pause(instance.handle)
        await self._become(session, SessionStatus.PAUSED)

    async def _stop(self, session: Session) -> None:
        await self._stopper.stop(session)
        self._connections.disconnect(session.id)

    async def _move_to_archive(self, session: Session) -> None:
        await self._archiver.archive(session)

    async def _heal(self, session: Session) -> None:
        """Set the status of a session in `error` to what really exists, and continue from there."""
        instance = await self._instances.of(session)
        state = State.GONE
        if instance is not None:
            state = await self._instances.state(instance.handle)
        if state is State.RUNNING and session.wanted is Wanted.RUNNING:
            await self._starter.start(session.id)
            return
        status = {
            State.RUNNING: SessionStatus.RUNNING,
            State.PAUSED: SessionStatus.PAUSED,
        }.get(state)
        if status is None:
            status = SessionStatus.STARTING
            if session.wanted.stops or session.rested_at is not None:
                # A stop removes what is left of its instance.
                left = session.instance_id is not None
                status = SessionStatus.STOPPING if left else SessionStatus.STOPPED
        await self._become(session, status)

    async def _clear(self, session: Session) -> None:
        """Remove what an ended session has on this node, after a last checkpoint."""
        await self._autosave.take_last_checkpoint(session)
        if session.instance_id is not None:
            await self._instances.remove(session.instance_id)
        if session.workspace is not None:
            await self._driver.workspaces.discard(session.workspace)
        await self._records.save(cleared(session, self._clock.now()), event="destroyed")

    async def _become(self, session: Session, status: SessionStatus) -> Session:
        return await self._records.save(with_status(session, status, self._clock.now()))

    # Ended sessions

    def session_ended(self, session: Session) -> None:
        self._clearing.add(session.id)
        self._replica.background.start(self._clear_ended(session), f"clear {session.id}")

    async def _clear_ended(self, session: Session) -> None:
        try:
            if self._records.is_here(session):
                await self.settle(session.id)
            else:
                await self._records.wake(session.runtime_node)
        finally:
            self._clearing.discard(session.id)
            self._observers.session_cleared(session.id)

    def is_clearing(self, session_id: str) -> bool:
        """Whether this process is about to remove the instance of an ended session."""
        return session_id in self._clearing

    # Another node

    async def leave(self, session_id: str, target: Node) -> Session:
        """
        Move a session of this node to another: take a checkpoint, remove what it has here, and
        notify the other node. What runs in it is killed.
        """
        leases = self._replica.leases
        async with leases.lease(instance_lease(session_id), leases.new_owner()):
            session = await self._records.get(session_id)
            if session.status.ended or not self._records.is_here(session):
                return session
            instance = await self._instances.of(session)
            await self._secure(session, instance)
            stored = await self._records.move(session, target)
            self._connections.disconnect(session_id)
            if instance is not None:
                await self._instances.remove(instance.id)
            if session.workspace is not None:
                await self._driver.workspaces.discard(session.workspace)
        await self._records.wake(target.id)
        return stored

    async def _secure(self, session: Session, instance: Instance | None) -> None:
        limit = self._archive.timeout
        try:
            async with asyncio.timeout(limit.total_seconds()):
                await self._archiver.secure(session, instance)
        except TimeoutError:
            raise TemporaryError(
                f"The workspace of session {session.id} was not saved within {limit}.",
                code="save_timeout",
            ) from None


def retry_delay(failures: int) -> timedelta:
    return min(timedelta(seconds=RETRY_BACKOFF) * float(2 ** min(failures - 1, 16)), MAX_PAUSE)
