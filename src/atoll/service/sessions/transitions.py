"""
The steps by which a session becomes what is wanted of it.

`settle` asks `model.plan` for the next step and does it, until the session is what is wanted; only
who has the lease of the session's instance does so. Each step may be cut off anywhere, by a crash
too, and is done again from what is recorded then: what is removed is first recorded as gone, or is
found by the sweep of orphans.

What fails for now is tried again after a pause that doubles. After some tries, or when trying again
is of no use, the session is in `error`, with the cause; it is looked at again and again, and goes
on when what is really there is fine. One that never came to run has failed instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    AtollError,
    Conflict,
    CoordinationUnavailable,
    DatabaseUnavailable,
    LeaseLost,
    NodeUnreachable,
    PermanentError,
    TemporaryError,
)
from atoll.link.errors import ExecutorError
from atoll.model import plan
from atoll.model.event import session_event
from atoll.model.instance import State
from atoll.model.plan import Step
from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning, WorkspaceMode
from atoll.service.sessions.autosave import NOT_SAVED
from atoll.service.sessions.connections import instance_lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.coordination.leases import Lease, Leases
    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Instance
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.service import Sessions
    from atoll.settings import ArchiveSettings, SessionSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

MOST_STEPS = 20
"""Steps in one go: more than any way through the table takes."""
LONGEST_PAUSE = timedelta(minutes=1)
SLOT_PAUSE = timedelta(seconds=5)
"""How long a session waits that cannot be archived because too many others are."""
PASSING = (DatabaseUnavailable, CoordinationUnavailable, LeaseLost, NodeUnreachable)
"""Errors that are not the session's: the step is repeated, and not counted as a failure."""

RETRY_BACKOFF = 1.0
"""Seconds before a failed step is tried again; they double with each failure, up to a minute."""
ERROR_RETRY = 60.0
"""Seconds between two tries of a session in `error`."""


class _Later(Exception):
    """Not now, for no fault of the session."""

    def __init__(self, pause: timedelta) -> None:
        self.pause = pause


class Transitions:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        pool: Pool,
        connections: Connections,
        sessions: Sessions,
        checkpoints: Checkpoints,
        leases: Leases,
        clock: Clock,
        settings: SessionSettings,
        archive: ArchiveSettings,
        node_id: str,
        *,
        remote: bool,
    ) -> None:
        """`remote`: the blobs are not on the node's own disk."""
        self._store = store
        self._driver = driver
        self._pool = pool
        self._connections = connections
        connections.halt = self._stop
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._leases = leases
        self._clock = clock
        self._settings = settings
        self._archive_settings = archive
        self._node_id = node_id
        self._remote = remote
        self.again: Callable[[str, float], None] = lambda session_id, seconds: None
        """Told which session is to be seen to in how many seconds, because something failed."""
        self._handlers: dict[Step, Callable[[Session], Awaitable[Session]]] = {
            Step.START: self._start,
            Step.RESUME: self._start,
            Step.PAUSE: self._pause,
            Step.STOP: self._stop,
            Step.ARCHIVE: self._archive,
            Step.HEAL: self._heal,
            Step.CLEAR: self._clear,
        }

    async def settle(self, session_id: str, *, wait: bool = True) -> Session | None:
        """
        Bring a session of this node to what is wanted, as far as that goes. Without `wait`, None
        when another has its lease: then that one does. What fails is recorded and raised.
        """
        key, owner = instance_lease(session_id), self._leases.new_owner()
        lease: Lease | None = self._leases.lease(key, owner)
        if not wait:
            lease = await self._leases.try_lease(key, owner)
        if lease is None:
            return None
        async with lease:
            for _ in range(MOST_STEPS):
                session = await self._connections.session(session_id)
                if session.runtime_node != self._node_id:
                    return session  # It has moved.
                step = plan.next_step(session)
                if step is Step.REST:
                    return session
                await self._do(step, session)
        raise PermanentError(f"Session {session_id} does not settle.", code="session_unsettled")

    async def _do(self, step: Step, session: Session) -> None:
        try:
            await self._handlers[step](session)
        except Conflict as error:
            # It was changed meanwhile: what it is now counts.
            log.info("session.moved_on", session_id=session.id, step=step, error=error.message)
        except _Later as later:
            await self._put_off(session, later.pause)
            raise TemporaryError(
                f"Session {session.id} waits for others to be archived.", code="archive_busy"
            ) from None
        except PASSING:
            raise
        except AtollError as error:
            await self._failed(session.id, step, error)
            raise

    # When it does not go

    async def _put_off(self, session: Session, pause: timedelta) -> None:
        now = self._clock.now()
        with contextlib.suppress(Conflict):
            await self._store.sessions.save(dataclasses.replace(session, retry_at=now + pause))
        self.again(session.id, pause.total_seconds())

    async def _failed(self, session_id: str, step: Step, error: AtollError) -> None:
        """Record it, and when it is tried again."""
        session = await self._connections.session(session_id)
        if plan.next_step(session) is Step.REST or (
            session.status.ended and step is not Step.CLEAR
        ):
            return
        now, settings = self._clock.now(), self._settings
        failures = session.failures + 1
        most = self._archive_settings.retries if step is Step.ARCHIVE else settings.retries
        if session.status is SessionStatus.CREATING:
            cause = Cause(error.cause) if isinstance(error, PermanentError) else Cause.DRIVER
            with contextlib.suppress(Conflict):
                await self._sessions.end(session, SessionStatus.FAILED, cause, error.message)
            return
        changed = dataclasses.replace(
            session,
            failures=failures,
            retry_at=now + _pause(failures, timedelta(seconds=RETRY_BACKOFF)),
            message=error.message,
            updated_at=now,
        )
        event = None
        if not session.status.ended and (isinstance(error, PermanentError) or failures > most):
            cause = Cause(error.cause) if isinstance(error, PermanentError) else Cause.DRIVER
            changed = dataclasses.replace(
                changed,
                status=SessionStatus.ERROR,
                cause=cause,
                retry_at=now + timedelta(seconds=ERROR_RETRY),
            )
            event = session_event(changed, now)
        log.warning(
            "session.step_failed",
            session_id=session.id,
            step=step,
            failures=failures,
            code=error.code,
            error=error.message,
        )
        with contextlib.suppress(Conflict):
            await self._store.sessions.save(changed, event=event)
        assert changed.retry_at is not None
        self.again(session.id, (changed.retry_at - now).total_seconds())

    # Steps

    async def _start(self, session: Session) -> Session:
        return (await self._connections.bring_up(session.id)).session

    async def _pause(self, session: Session) -> Session:
        instance = await self._instance(session)
        if instance is None or not await self._runner(instance):
            # Nothing to keep in memory any more.
            return (await self._connections.bring_up(session.id)).session
        if session.status is not SessionStatus.PAUSING:
            session = await self._become(session, SessionStatus.PAUSING)
        link = await self._driver.connect(instance.handle)
        try:
            # Other replicas are to find out what it is when they need it the next time.
            with contextlib.suppress(ExecutorError):  # One of before does not know the words.
                await link.call("detach")
                # So that what stands still can be copied.
                await link.call("sync")
            if any(not run["ended"] for run in link.hello["runs"]):
                await self._keep_running(session)
                return session
        finally:
            link.close()
        self._connections.let_go(session.id)
        await self._driver.pause(instance.handle)
        return await self._become(session, SessionStatus.PAUSED)

    async def _keep_running(self, session: Session) -> None:
        """What has begun to run there since is not made to stand still."""
        now = self._clock.now()
        running = dataclasses.replace(
            session, status=SessionStatus.RUNNING, wanted=Wanted.RUNNING, updated_at=now
        )
        await self._store.sessions.save(running, event=session_event(running, now))

    async def _stop(self, session: Session) -> Session:
        if session.status is not SessionStatus.STOPPING:
            session = await self._become(session, SessionStatus.STOPPING)
        self._sessions.halted(session)
        instance = await self._instance(session)
        if instance is not None:
            why = await self._end(session, instance, save=self._remote)
            if why is not None:
                session = _warned(session, Warning(NOT_SAVED, why))
        self._connections.let_go(session.id)
        return await self._become(session, SessionStatus.STOPPED, instance_id=None)

    async def _end(self, session: Session, instance: Instance, *, save: bool) -> str | None:
        """End an instance, after what is in its workspace was saved; why it was not, if so."""
        handle, why = instance.handle, None
        if await self._connections.state(handle) is State.PAUSED:
            await self._driver.resume(handle)
        if save and session.workspace_mode is WorkspaceMode.SYNC and await self._runner(instance):
            most = self._archive_settings.timeout
            try:
                async with asyncio.timeout(most.total_seconds()), self._quieted(instance) as link:
                    await self._checkpoints.take(session.id, link, empty=True)
            except (AtollError, TimeoutError) as error:
                # Its files are where they were, and are saved when it is archived. Whatever keeps
                # them from being saved does not keep it from being stopped.
                why = str(error) or f"That took longer than {most}."
                log.warning("workspace.not_saved", session_id=session.id, error=why)
        await self._driver.stop(handle, grace=self._settings.stop_grace)
        await self._driver.destroy(handle)
        await self._store.instances.remove(instance.id)
        return why

    @contextlib.asynccontextmanager
    async def _quieted(self, instance: Instance) -> AsyncIterator[Link]:
        """Its executor, with nothing of the user's running any more: asked first, then made to."""
        link = await self._driver.connect(instance.handle)
        try:
            await self._cancel_runs(link)
            with contextlib.suppress(ExecutorError):  # One of before does not know the word.
                await link.call("quiet")
            yield link
        finally:
            link.close()

    async def _cancel_runs(self, link: Link) -> None:
        runner = [run["id"] for run in link.hello["runs"] if not run["ended"]]
        grace = self._settings.stop_grace.total_seconds()
        with contextlib.suppress(TimeoutError, ExecutorError):
            async with asyncio.timeout(grace):
                for run in runner:
                    await link.call("cancel", id=run, grace=grace)
                for run in runner:
                    await link.attach(run, 0, None)

    async def _archive(self, session: Session) -> Session:
        async with self._slot():
            if session.status is not SessionStatus.ARCHIVING:
                session = await self._become(session, SessionStatus.ARCHIVING)
            most = self._archive_settings.timeout
            try:
                async with asyncio.timeout(most.total_seconds()):
                    await self._saved(session)
            except TimeoutError:
                raise PermanentError(
                    f"Session {session.id} was not archived in {most}.",
                    code="archive_timeout",
                    cause=Cause.TIMEOUT,
                ) from None
            workspace = session.workspace
            session = await self._become(_warned(session), SessionStatus.ARCHIVED, workspace=None)
        if workspace is not None:
            try:
                await self._driver.discard(workspace)
            except AtollError as error:
                # It is nobody's now, and the sweep finds it.
                log.warning("workspace.not_discarded", workspace=workspace, error=error.message)
        return session

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of the node's places for what is archived; another time when all are taken."""
        for number in range(self._archive_settings.concurrency):
            key = f"archive:{self._node_id}#{number}"
            lease = await self._leases.try_lease(key, self._leases.new_owner())
            if lease is not None:
                async with lease:
                    yield
                return
        raise _Later(SLOT_PAUSE)

    async def save_resting(self, session_id: str) -> None:
        """Save the files of a session of this node that is stopped, or ended when it was."""
        session = await self._connections.session(session_id)
        if session.status.ended:
            await self._saved(session)  # Who clears it has its lease.
            return
        async with self._leases.lease(instance_lease(session_id), self._leases.new_owner()):
            session = await self._connections.session(session_id)
            if session.status is SessionStatus.STOPPED:
                await self._saved(session)

    async def _saved(self, session: Session) -> None:
        """By an instance that is made for it."""
        here = session.runtime_node == self._node_id and session.workspace is not None
        if not here or session.workspace_mode is not WorkspaceMode.SYNC:
            return
        ready = await self._connections.make(session)
        try:
            with contextlib.suppress(ExecutorError):
                await ready.link.call("quiet")
            await self._checkpoints.secure(session.id, ready.link)
        finally:
            ready.link.close()
            await asyncio.shield(self._pool.clear(ready.instance.id, workspace_too=False))

    async def _heal(self, session: Session) -> Session:
        """Go on from what is really there; if that does not go either, it is in `error` again."""
        instance = await self._instance(session)
        state = State.GONE
        if instance is not None:
            state = await self._connections.state(instance.handle)
        if state is State.RUNNING and session.wanted is Wanted.RUNNING:
            return (await self._connections.bring_up(session.id)).session
        status = {
            State.RUNNING: SessionStatus.RUNNING,
            State.PAUSED: SessionStatus.PAUSED,
        }.get(state)
        if status is None:
            status = SessionStatus.STARTING
            if session.wanted in (Wanted.STOPPED, Wanted.ARCHIVED) or session.rested_at is not None:
                # What is left of its instance goes as in any stop.
                left = session.instance_id is not None
                status = SessionStatus.STOPPING if left else SessionStatus.STOPPED
        return await self._become(session, status)

    async def _clear(self, session: Session) -> Session:
        await self._sessions.clear(session)
        now = self._clock.now()
        cleared = dataclasses.replace(
            session, instance_id=None, workspace=None, retry_at=None, updated_at=now
        )
        event = session_event(cleared, now, "destroyed")
        return await self._store.sessions.save(cleared, event=event)

    # Away from here

    async def leave(self, session_id: str, target: str) -> Session:
        """
        Give a session of this node to another: its files are saved and verified, then it has
        nothing here any more and the other node is told. What runs in it is ended.
        """
        async with self._leases.lease(instance_lease(session_id), self._leases.new_owner()):
            session = await self._connections.session(session_id)
            if session.status.ended or session.runtime_node != self._node_id:
                return session
            instance = await self._instance(session)
            most = self._archive_settings.timeout
            try:
                async with asyncio.timeout(most.total_seconds()):
                    await self._secured(session, instance)
            except TimeoutError:
                raise TemporaryError(
                    f"The workspace of session {session_id} was not saved in {most}.",
                    code="save_timeout",
                ) from None
            moved = plan.moved(session, target, self._clock.now())
            event = session_event(moved, moved.updated_at, "moved")
            stored = await self._store.sessions.save(moved, event=event)
            self._connections.let_go(session_id)
            if instance is not None:
                await self._driver.destroy(instance.handle)
                await self._store.instances.remove(instance.id)
            if session.workspace is not None:
                await self._driver.discard(session.workspace)
        await self._sessions.wake(target)
        return stored

    async def _secured(self, session: Session, instance: Instance | None) -> None:
        """Have its files in the blob store for certain."""
        if instance is None or not await self._runner(instance):
            await self._saved(session)
        elif session.workspace_mode is WorkspaceMode.SYNC:
            async with self._quieted(instance) as link:
                await self._checkpoints.secure(session.id, link)

    # What is there

    async def _instance(self, session: Session) -> Instance | None:
        if session.instance_id is None:
            return None
        return await self._store.instances.get(session.instance_id)

    async def _runner(self, instance: Instance) -> bool:
        state = await self._connections.state(instance.handle)
        if state is State.PAUSED:
            await self._driver.resume(instance.handle)
            return True
        return state is State.RUNNING

    async def _become(
        self, session: Session, status: SessionStatus, **changes: str | None
    ) -> Session:
        now = self._clock.now()
        resting = status in (
            SessionStatus.STOPPING,
            SessionStatus.STOPPED,
            SessionStatus.ARCHIVING,
            SessionStatus.ARCHIVED,
        )
        settled = plan.TABLE[session.wanted, plan.Observed(status.value)] is Step.REST
        changed = dataclasses.replace(
            session,
            status=status,
            rested_at=_rested(session, now) if resting else None,
            failures=0 if settled else session.failures,
            retry_at=None,
            message=None if settled else session.message,
            updated_at=now,
            **changes,  # type: ignore[arg-type]
        )
        return await self._store.sessions.save(changed, event=session_event(changed, now))


def _warned(session: Session, *warnings: Warning) -> Session:
    """The session with these warnings of what is not saved, and no others."""
    others = tuple(item for item in session.warnings if item.code != NOT_SAVED)
    return dataclasses.replace(session, warnings=(*others, *warnings))


def _rested(session: Session, now: datetime) -> datetime:
    return session.rested_at or now


def _pause(failures: int, first: timedelta) -> timedelta:
    return min(first * float(2 ** min(failures - 1, 16)), LONGEST_PAUSE)
