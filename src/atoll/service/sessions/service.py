"""
Sessions: made, found, ended.

A session is a record first. What else is wanted of it is the matter of `wants`, how its compute is
reached that of `lives`; `steps` brings about what is wanted, what is left of an ended one too.
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
from atoll.model.event import session_event
from atoll.model.install import InstallStatus
from atoll.model.session import Cause, Session, SessionStatus, Wanted, WorkspaceMode
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.sessions.connections import instance_lease
from atoll.service.sessions.provisioning import NOTHING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from atoll.clock import Clock
    from atoll.coordination.leases import Leases
    from atoll.drivers.base import Driver
    from atoll.model.page import Page
    from atoll.model.resources import Resources
    from atoll.service.background import BackgroundTasks
    from atoll.service.pool.service import Pool, ReadyInstance
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.provisioning import Extras, Provisioning
    from atoll.service.templates.service import Templates
    from atoll.settings import Settings
    from atoll.stores.recall import RecallingStore

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 1.0

MAX_CAPACITY = 64
"""Executions that a session may run at the same time."""


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


def is_installing(session: Session) -> bool:
    install = session.install
    return install is not None and install.status is InstallStatus.INSTALLING


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """How long a session is kept and in what state, by itself; 0 is never."""

    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    node_labels: dict[str, str] = dataclasses.field(default_factory=dict)
    auto_start: bool = True
    idle_timeout: int | None = None
    archive_after: int | None = None
    delete_after: int | None = None


AS_SET = Terms()


async def _admitted(session: Session) -> Callable[[], None]:
    return lambda: None


async def _nobody(node_id: str) -> None:
    """There is no other node."""


def _seconds(asked: int | None, otherwise: timedelta | None) -> int | None:
    if asked is None:
        return None if otherwise is None else max(1, int(otherwise.total_seconds()))
    return asked or None


class Sessions:
    def __init__(
        self,
        store: RecallingStore,
        driver: Driver,
        pool: Pool,
        templates: Templates,
        connections: Connections,
        leases: Leases,
        background: BackgroundTasks,
        clock: Clock,
        settings: Settings,
        node_id: str,
        provisioning: Provisioning,
    ) -> None:
        self._store = store
        self._driver = driver
        self._pool = pool
        self._templates = templates
        self._provisioning = provisioning
        self._connections = connections
        self._leases = leases
        self._background = background
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self.created = {"pool": 0, "cold": 0}
        """How many sessions were created, by how they started."""
        self.ended: Callable[[Session], None] = lambda session: None
        """Told when a session ends, before its instance goes."""
        self.halted: Callable[[Session], None] = lambda session: None
        """Told when a session is stopped, before its instance goes."""
        self.finish: Callable[[Session], Coroutine[Any, Any, Session]]
        """Brings a session to run whose packages have to be installed first."""
        self.schedule: Callable[[Session], None] = lambda session: None
        """Sees to a session when its next timer runs out."""
        self.settle: Callable[[str], Coroutine[Any, Any, Session | None]]
        """Brings a session to what is wanted."""
        self.wake: Callable[[str], Awaitable[None]] = _nobody
        """Tells a node's control planes that sessions of it have come to want something."""
        self.clearing: set[str] = set()
        """Ids of ended sessions whose instances this process is about to remove."""
        self.admit: Callable[[Session], Awaitable[Callable[[], None]]] = _admitted
        """
        Refuses a session that this node does not take; gives what to call when it is stored, or
        will not be.
        """
        self.autosave: Autosave | None = None
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
        terms: Terms = AS_SET,
        wait: bool = True,
    ) -> Session:
        """
        A running session; the one that is there already when its id is given and known. Without
        `wait`, one whose packages have to be installed is given back before they are.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self.known(known)
        template = await self._templates.ready(template_id or DEFAULT_TEMPLATE)
        resources = limits(template.default_resources)
        if resources is not template.default_resources:
            await self._templates.check_resources(resources)
        seconds = self.life(timeout)
        if capacity > MAX_CAPACITY:
            raise InvalidRequest(f"capacity: at most {MAX_CAPACITY}.", field="capacity")
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
            active_at=now,
            labels=terms.labels,
            node_labels=terms.node_labels,
            auto_start=terms.auto_start,
            idle_timeout=_seconds(terms.idle_timeout, self._settings.session.idle_timeout),
            archive_after=_seconds(terms.archive_after, self._settings.session.archive_after),
            delete_after=_seconds(terms.delete_after, self._settings.session.delete_after),
        )
        if self._store.away:
            await self._store.ping()  # Before a ready instance is taken for nothing.
        if self.autosave is not None:
            session = self.autosave.begun(session)
        if extras is not NOTHING:
            if extras.started_from is not None and self.autosave is not None:
                await self.autosave.fresh(extras.started_from)
            session = await self._provisioning.granted(session, template, extras)
        if is_installing(session) and extras.install is not None:
            # Its life begins when they are installed.
            later = session.expires_at + timedelta(seconds=extras.install.timeout)
            session = dataclasses.replace(session, expires_at=later)
        if _fits_ready_one(session):
            admitted = await self.admit(session)
            try:
                ready = self._pool.take(template, resources)
                if ready is not None:
                    return await self._adopt(session, ready)
            except Conflict as error:
                # Others took this replica for lost, and its ready instances away.
                log.warning("pool.instance_lost", session_id=session.id, error=error.message)
            finally:
                admitted()
        return await self.begin(session, wait=wait)

    async def begin(self, session: Session, *, wait: bool = True) -> Session:
        """Record a new session, and make an instance for it."""
        admitted = await self.admit(session)
        try:
            event = session_event(session, session.created_at, "created")
            await self._store.sessions.add(session, event=event)
        except Conflict:
            known = await self._store.sessions.get(session.id)
            if known is None:
                raise
            # A replica that was taken for lost was at the same request, and was quicker.
            return await self.known(known)
        finally:
            admitted()
        if not is_installing(session):
            return await self._start_cold(session)
        # Who asked may go away: what takes minutes goes on, and can be looked at.
        self.schedule(session)
        starting = self._background.start(self.finish(session), f"start {session.id}")
        return await asyncio.shield(starting) if wait else session

    async def known(self, session: Session) -> Session:
        """One that was created before, by a request that came to no answer."""
        if session.status is SessionStatus.FAILED:
            raise PermanentError(
                session.message or f"Session {session.id} could not be created.",
                code="session_failed",
            )
        if session.status.ended or session.runtime_node != self._node_id:
            return session  # Whoever asks for it is led to its node.
        return (await self._connections.get(session.id)).session

    def life(self, timeout: int | None) -> int:
        most = self._settings.session.max_timeout.total_seconds()
        seconds = timeout or int(self._settings.session.timeout.total_seconds())
        if seconds > most:
            raise InvalidRequest(
                f"timeout: at most {most:g} seconds are allowed here.", field="timeout"
            )
        return seconds

    async def _adopt(self, session: Session, ready: ReadyInstance) -> Session:
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
            self._background.start(self._pool.destroy(ready), f"destroy {ready.instance.id}")
            raise
        try:
            event = session_event(session, session.created_at, "created")
            await self._store.sessions.add(session, event=event)
        except Conflict:
            self._background.start(self._pool.destroy(ready), f"destroy {ready.instance.id}")
            raise
        except BaseException:
            # It may have been written all the same.
            self._background.start(self._settle(session, ready), f"settle {session.id}")
            raise
        self._connections.keep(session, ready.instance, ready.link)
        self.created["pool"] += 1
        return session

    async def _settle(self, session: Session, ready: ReadyInstance) -> None:
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
            ready.link.close()
            # Else it goes with the session, or stays with it.
            nobodys = found is None or found.workspace != ready.instance.workspace
            await self._pool.clear(ready.instance.id, workspace_too=nobodys)
        elif self._connections.reachable(session.id) is not None:
            ready.link.close()  # Who repeated the request has connected already.
        else:
            self._connections.keep(found, ready.instance, ready.link)

    async def _start_cold(self, session: Session) -> Session:
        # Else whoever finds a session that is not yet what is wanted would begin with it too.
        async with self._leases.lease(instance_lease(session.id), self._leases.new_owner()):
            return await self._make_first(session)

    async def _make_first(self, session: Session) -> Session:
        try:
            ready = await self._connections.make(session)
        except AtollError as error:
            await self.end(session, SessionStatus.FAILED, Cause.DRIVER, error.message)
            raise
        except BaseException:
            # Cancelled, or broken here: nobody will come for it.
            words = "Its creation was broken off."
            ending = self.end(session, SessionStatus.FAILED, Cause.DRIVER, words)
            self._background.start(ending, f"end {session.id}")
            raise
        running = dataclasses.replace(
            session,
            status=SessionStatus.RUNNING,
            instance_id=ready.instance.id,
            workspace=ready.instance.workspace,
            warnings=session.warnings + ready.warnings,
            updated_at=self._clock.now(),
        )
        try:
            event = session_event(running, running.updated_at)
            running = await self._store.sessions.save(running, event=event)
        except Conflict:
            # Ended or changed while it was being made, or a replica that took this one for lost
            # made it too. A workspace that it had before stays its own.
            ready.link.close()
            made = session.workspace is None
            await asyncio.shield(self._pool.clear(ready.instance.id, workspace_too=made))
            return (await self._connections.bring_up(session.id)).session
        except BaseException:
            # It may have been written all the same, and then this is its instance and workspace.
            self._background.start(self._settle(running, ready), f"settle {session.id}")
            raise
        self._connections.keep(running, ready.instance, ready.link)
        self.created["cold"] += 1
        log.debug("session.started", session_id=session.id, instance_id=ready.instance.id)
        return running

    # Reading

    async def get(self, session_id: str) -> Session:
        return await self._connections.session(session_id)

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
        return await self.over(session_id, SessionStatus.TERMINATED, Cause.USER)

    async def stop_all(self) -> None:
        """The server ends for good: the sessions of its node with it."""
        after = ""
        while unfinished := await self._store.sessions.unfinished(
            limit=100, after=after, node_id=self._node_id
        ):
            for session in unfinished:
                await self.over(session.id, SessionStatus.TERMINATED, Cause.SHUTDOWN)
            after = unfinished[-1].id
        after = ""
        while held := await self._store.sessions.holdings(self._node_id, limit=100, after=after):
            for one in held:
                # It had ended before, and nobody comes back to clear it.
                if one.session_id not in self.clearing:
                    self._background.start(self.settle(one.session_id), f"clear {one.session_id}")
            after = held[-1].session_id

    async def over(self, session_id: str, status: SessionStatus, cause: Cause) -> Session:
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
        ended = dataclasses.replace(
            session,
            status=status,
            wanted=Wanted.DESTROYED,
            cause=cause,
            message=message,
            ended_at=now,
            failures=0,
            retry_at=None,
            updated_at=now,
        )
        session = await self._store.sessions.save(ended, event=session_event(ended, now))
        self.schedule(session)  # It has no timers any more.
        self.clearing.add(session.id)
        self.ended(session)
        self._connections.let_go(session.id)
        if self.autosave is not None and session.runtime_node == self._node_id:
            # Before who asked is answered: it may come for the files at once.
            self.autosave.leaving(session.id)
        self._background.start(self._clear_soon(session), f"clear {session.id}")
        log.debug("session.ended", session_id=session.id, status=status, cause=cause)
        return session

    async def _clear_soon(self, session: Session) -> None:
        try:
            if session.runtime_node == self._node_id:
                await self.settle(session.id)
            else:
                await self.wake(session.runtime_node)
        finally:
            self.clearing.discard(session.id)
            if self.autosave is not None:
                self.autosave.gone(session.id)

    async def clear(self, session: Session) -> None:
        """Remove what an ended session has on this node, its files saved before that."""
        if self.autosave is not None:
            await self.autosave.last(session)
        if session.instance_id is not None:
            await self._connections.remove_instance(session.instance_id)
        if session.workspace is not None:
            await self._driver.discard(session.workspace)

    async def processes(self, session_id: str, *, end: bool = False) -> Sequence[Any]:
        """What executions of the session left running; with `end`, its end."""
        connection = await self._connections.get(session_id)
        answer = await connection.link.call("processes", kill=end)
        found: Sequence[Any] = answer["processes"]
        return found
