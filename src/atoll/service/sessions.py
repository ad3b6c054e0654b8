"""
Sessions: made, found, ended.

A session is a record first. How its compute is reached is the matter of `lives`; when its life is
over it ends by a timer here, or by the sweep where this replica could not.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.errors import (
    AtollError,
    Conflict,
    InvalidRequest,
    PermanentError,
    TemporaryError,
)
from atoll.model.packages import InstallStatus
from atoll.model.session import Cause, Session, SessionStatus, Wanted, WorkspaceMode
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.provision import NOTHING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.page import Page
    from atoll.model.resources import Resources
    from atoll.service.lives import Lives
    from atoll.service.pool import Pool, Ready
    from atoll.service.provision import Extras, Provision
    from atoll.service.saves import Saves
    from atoll.service.tasks import Tasks
    from atoll.service.templates import Templates
    from atoll.settings import Settings
    from atoll.stores.recall import RecallingStore

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 1.0


def settle_topic(node_id: str) -> str:
    """What is told when sessions of a node have come to want something."""
    return f"settle.{node_id}"


def _fits_ready_one(session: Session) -> bool:
    """Whether an instance that was made for nobody in particular will do."""
    return not session.volumes and (
        session.workspace_mode is WorkspaceMode.SYNC
        and session.started_from is None
        and not is_installing(session)
    )


async def _admitted(session: Session) -> Callable[[], None]:
    return lambda: None


def is_installing(session: Session) -> bool:
    install = session.install
    return install is not None and install.status is InstallStatus.INSTALLING


class Sessions:
    def __init__(
        self,
        store: RecallingStore,
        driver: Driver,
        pool: Pool,
        templates: Templates,
        lives: Lives,
        tasks: Tasks,
        clock: Clock,
        settings: Settings,
        node_id: str,
        provision: Provision,
    ) -> None:
        self._store = store
        self._driver = driver
        self._pool = pool
        self._templates = templates
        self._provision = provision
        self._lives = lives
        lives.kept = self.schedule_end
        self._tasks = tasks
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.created = {"pool": 0, "cold": 0}
        """How many sessions were created, by how they started."""
        self.ended: Callable[[Session], None] = lambda session: None
        """Told when a session ends, before its instance goes."""
        self.finish: Callable[[Session], Coroutine[Any, Any, Session]]
        """Brings a session to run whose packages have to be installed first."""
        self.clearing: set[str] = set()
        """Ids of ended sessions whose instances this process is about to remove."""
        self.admit: Callable[[Session], Awaitable[Callable[[], None]]] = _admitted
        """
        Refuses a session that this node does not take; gives what to call when it is stored, or
        will not be.
        """
        self.saves: Saves | None = None
        """What sees to their files; none where nothing is saved."""

    # Verbs

    async def create(
        self,
        *,
        template_id: str | None,
        limits: Callable[[Resources], Resources],
        timeout: int | None,
        env_vars: dict[str, str],
        capacity: int = 1,
        session_id: str | None = None,
        extras: Extras = NOTHING,
        wait: bool = True,
    ) -> Session:
        """
        A running session; the one that is there already when its id is given and known. Without
        `wait`, one whose packages have to be installed is given back before they are.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self._known(known)
        template = await self._templates.ready(template_id or DEFAULT_TEMPLATE)
        resources = limits(template.default_resources)
        if resources is not template.default_resources:
            self._templates.check_resources(resources)
        seconds = self._life(timeout)
        if capacity > (most := self._settings.execution.max_capacity):
            raise InvalidRequest(f"capacity: at most {most} are allowed here.", field="capacity")
        now = self._clock.now()
        session = Session(
            id=session_id or ids.session_id(),
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
            env_vars={**template.env, **env_vars},
            capacity=capacity,
        )
        if self._store.away:
            await self._store.ping()  # Before a ready instance is taken for nothing.
        if self.saves is not None:
            session = self.saves.begun(session)
        if extras is not NOTHING:
            if extras.started_from is not None and self.saves is not None:
                await self.saves.fresh(extras.started_from)
            session = await self._provision.granted(session, template, extras)
        if is_installing(session) and extras.install is not None:
            # Its life begins when they are installed.
            later = session.expires_at + timedelta(seconds=extras.install.timeout)
            session = dataclasses.replace(session, expires_at=later)
        admitted = await self.admit(session)
        try:
            ready = self._pool.take(template, resources) if _fits_ready_one(session) else None
            if ready is not None:
                try:
                    return await self._adopt(session, ready)
                except Conflict as error:
                    # Others took this replica for lost, and its ready instances away.
                    log.warning("pool.instance_lost", session_id=session.id, error=error.message)
            await self._store.sessions.add(session)
        except Conflict:
            known = None if session_id is None else await self._store.sessions.get(session_id)
            if known is None:
                raise
            # A replica that was taken for lost was at the same request, and was quicker.
            return await self._known(known)
        finally:
            admitted()
        if not is_installing(session):
            return await self._start_cold(session)
        # Who asked may go away: what takes minutes goes on, and can be looked at.
        self.schedule_end(session)
        starting = self._tasks.start(self.finish(session), f"start {session.id}")
        return await asyncio.shield(starting) if wait else session

    async def _known(self, session: Session) -> Session:
        """One that was created before, by a request that came to no answer."""
        if session.status is SessionStatus.FAILED:
            raise PermanentError(
                session.message or f"Session {session.id} could not be created.",
                code="session_failed",
            )
        if session.status.ended or session.runtime_node != self._node_id:
            return session  # Whoever asks for it is led to its node.
        return (await self._lives.live(session.id)).session

    def _life(self, timeout: int | None) -> int:
        most = self._settings.session.max_timeout.total_seconds()
        seconds = timeout or int(self._settings.session.timeout.total_seconds())
        if seconds > most:
            raise InvalidRequest(
                f"timeout: at most {most:g} seconds are allowed here.", field="timeout"
            )
        return seconds

    async def _adopt(self, session: Session, ready: Ready) -> Session:
        """A session on a ready instance: one commit."""
        session = dataclasses.replace(
            session,
            status=SessionStatus.RUNNING,
            instance_id=ready.instance.id,
            workspace=ready.instance.workspace,
        )
        try:
            if ready.resources != session.resources:
                handle = ready.instance.handle
                if not await self._driver.resize(handle, session.resources):
                    raise TemporaryError(f"Instance {handle.instance_id} keeps its limits.")
        except BaseException:
            self._tasks.start(self._pool.destroy(ready), f"destroy {ready.instance.id}")
            raise
        try:
            await self._store.sessions.add(session)
        except Conflict:
            self._tasks.start(self._pool.destroy(ready), f"destroy {ready.instance.id}")
            raise
        except BaseException:
            # It may have been written all the same.
            self._tasks.start(self._settle(session, ready), f"settle {session.id}")
            raise
        self._lives.keep(session, ready.instance, ready.link)
        self.created["pool"] += 1
        return session

    async def _settle(self, session: Session, ready: Ready) -> None:
        """
        After a write whose fate is not known: keep the instance if the session was recorded, so
        that who repeats the request finds it.
        """
        while True:
            try:
                found = await self._store.sessions.get(session.id)
                break
            except TemporaryError:
                await asyncio.sleep(SETTLE_SECONDS)
        if found is None or found.status.ended or found.instance_id != ready.instance.id:
            await self._pool.destroy(ready)
        elif self._lives.reachable(session.id) is not None:
            ready.link.close()  # Who repeated the request has connected already.
        else:
            self._lives.keep(found, ready.instance, ready.link)

    async def _start_cold(self, session: Session) -> Session:
        try:
            ready = await self._lives.make(session)
        except AtollError as error:
            await self.end(session, SessionStatus.FAILED, Cause.DRIVER, error.message)
            raise
        except BaseException:
            # Cancelled, or broken here: nobody will come for it.
            words = "Its creation was broken off."
            ending = self.end(session, SessionStatus.FAILED, Cause.DRIVER, words)
            self._tasks.start(ending, f"end {session.id}")
            raise
        running = dataclasses.replace(
            session,
            status=SessionStatus.RUNNING,
            instance_id=ready.instance.id,
            workspace=ready.instance.workspace,
            updated_at=self._clock.now(),
        )
        try:
            running = await self._store.sessions.save(running)
        except Conflict:
            # Ended while it was being made, or needed elsewhere so soon that another replica made
            # it as well.
            await asyncio.shield(self._pool.destroy(ready))
            return (await self._lives.live(session.id)).session
        except BaseException:
            # It may have been written all the same, and then this is its instance and workspace.
            self._tasks.start(self._settle(running, ready), f"settle {session.id}")
            raise
        self._lives.keep(running, ready.instance, ready.link)
        self.created["cold"] += 1
        log.debug("session.started", session_id=session.id, instance_id=ready.instance.id)
        return running

    def schedule_end(self, session: Session) -> None:
        """End the session when its life is over; the sweep does it where this process could not."""
        left = (session.expires_at - self._clock.now()).total_seconds()
        old = self._timers.pop(session.id, None)
        if old is not None:
            old.cancel()
        self._timers[session.id] = asyncio.get_running_loop().call_later(
            max(0.0, left), self._start_expiry, session.id
        )

    def _start_expiry(self, session_id: str) -> None:
        self._timers.pop(session_id, None)
        self._tasks.start(self.expire(session_id), f"expire {session_id}")

    async def get(self, session_id: str) -> Session:
        return await self._lives.session(session_id)

    async def look(self, session_id: str) -> tuple[Session, float | None]:
        """
        The session, and while the database is away what is remembered of it with its age in
        seconds. To show, not to decide by.
        """
        recall = self._store.recent_sessions.recall
        try:
            async with self._store.patience(recall(session_id)):
                return await self.get(session_id), None
        except TemporaryError:
            remembered = recall(session_id)
            if remembered is None:
                raise
            return remembered.entity, remembered.age

    async def list(
        self,
        *,
        status: SessionStatus | None,
        template_id: str | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Session]:
        return await self._store.sessions.page(
            status=status, template_id=template_id, cursor=cursor, limit=limit
        )

    async def delete(self, session_id: str) -> Session:
        """End a session; one that has ended stays as it ended."""
        return await self._finish(session_id, SessionStatus.TERMINATED, Cause.USER)

    async def expire(self, session_id: str) -> Session:
        session = await self.get(session_id)
        if not session.status.ended and session.expires_at > self._clock.now():
            # The clock went back, or the session was given more time.
            self.schedule_end(session)
            return session
        return await self._finish(session_id, SessionStatus.TIMEOUT, Cause.TIMEOUT)

    async def stop_all(self) -> None:
        """The server ends for good: the sessions of its node with it."""
        after = ""
        while unfinished := await self._store.sessions.unfinished(limit=100, after=after):
            for session in unfinished:
                if session.runtime_node == self._node_id:
                    await self._finish(session.id, SessionStatus.TERMINATED, Cause.SHUTDOWN)
            after = unfinished[-1].id

    async def _finish(self, session_id: str, status: SessionStatus, cause: Cause) -> Session:
        while True:
            session = await self.get(session_id)
            if session.status.ended:
                return session
            try:
                return await self.end(session, status, cause, None)
            except Conflict:
                continue  # It moved on meanwhile; decide again on what it is now.

    async def end(
        self, session: Session, status: SessionStatus, cause: Cause, message: str | None
    ) -> Session:
        now = self._clock.now()
        session = await self._store.sessions.save(
            dataclasses.replace(
                session,
                status=status,
                wanted=Wanted.DESTROYED,
                cause=cause,
                message=message,
                ended_at=now,
                updated_at=now,
            )
        )
        timer = self._timers.pop(session.id, None)
        if timer is not None:
            timer.cancel()
        self.clearing.add(session.id)
        self.ended(session)
        self._lives.let_go(session.id)
        self._tasks.start(self.clear(session), f"clear {session.id}")
        log.debug("session.ended", session_id=session.id, status=status, cause=cause)
        return session

    async def clear(self, session: Session) -> None:
        """
        Remove what an ended session had on the node; the sweep does it again if this is cut short.
        """
        try:
            if session.runtime_node != self._node_id:
                return  # It is not here. The sweep of its node finds that the session has ended.
            if self.saves is not None:
                await self.saves.last(session)
            if session.instance_id is not None:
                await self._lives.remove_instance(session.instance_id)
            if session.workspace is not None:
                await self._driver.discard(session.workspace)
        finally:
            self.clearing.discard(session.id)

    async def processes(self, session_id: str, *, end: bool = False) -> Sequence[Any]:
        """What executions of the session left running; with `end`, its end."""
        live = await self._lives.live(session_id)
        answer = await live.link.call("processes", kill=end)
        found: Sequence[Any] = answer["processes"]
        return found

    async def close(self) -> None:
        """Wait for no session's end any more."""
        for timer in self._timers.values():
            timer.cancel()
