"""
The compute of sessions, as this replica reaches it.

A session that runs has a `Live` here: its instance and the link to it. The store is the truth; a
`Live` is only how to reach what the store says, and goes with its link. Before an instance is
trusted it is looked at, at most once in a short while. One that has died is replaced in the same
session, with its workspace, by the next request that needs it, and a session that is paused or at
rest is started by it; requests that come at the same time cause one recovery, also when they come
to several replicas: it takes a lease.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    CheckpointDamaged,
    Conflict,
    CoordinationUnavailable,
    DatabaseUnavailable,
    DependencyFailed,
    LeaseLost,
    NodeFull,
    NodeUnreachable,
    NotFound,
    PermanentError,
    SessionEnded,
    SessionNotReady,
    SessionNotRunning,
    TemporaryError,
    WorkspaceLost,
)
from atoll.link.errors import ExecutorError, LinkLost, ProtocolViolation
from atoll.model.event import session_event
from atoll.model.instance import State
from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning, WorkspaceMode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.coordination.leases import Leases
    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Handle, Instance
    from atoll.model.volume import Volume, VolumeMount
    from atoll.service.background import BackgroundTasks
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.pool.service import Pool, ReadyInstance
    from atoll.service.templates.service import Templates
    from atoll.settings import SessionSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

NOT_OF_THE_SESSION = (
    DatabaseUnavailable,
    CoordinationUnavailable,
    LeaseLost,
    NodeFull,
    NodeUnreachable,
    DependencyFailed,
    CheckpointDamaged,
)
"""Errors that say more than that the session is not ready."""
may_start: ContextVar[bool] = ContextVar("may_start", default=True)
"""Whether the present request may start a session; not when its key may only read."""
ENDING_LOOKS = 100
ENDING_PAUSE = 0.01
"""Seconds."""


UP = (
    SessionStatus.CREATING,
    SessionStatus.STARTING,
    SessionStatus.RESTORING,
    SessionStatus.RUNNING,
    SessionStatus.PAUSING,
    SessionStatus.PAUSED,
    SessionStatus.ERROR,
)
"""Statuses in which an instance that is found is the one to go on with."""

PROBE_INTERVAL = 1.0
"""Seconds for which the last probe of an instance counts."""
PROBE_TIMEOUT = 2.0
"""Seconds that a probe of an instance may take; when it takes longer the instance is trusted."""


def instance_lease(session_id: str) -> str:
    """Who has it is the one that changes what the session has on its node."""
    return f"instance:{session_id}"


def workspace_lease(workspace: str) -> str:
    """Who has it makes the workspace, for a session that is not recorded yet."""
    return f"workspace:{workspace}"


def still_up(session: Session, now: datetime) -> Session:
    """One that was to rest and has not begun to, and is to run after all: with a new life."""
    if session.rested_at is None or session.status not in UP:
        return session
    return dataclasses.replace(
        session, rested_at=None, expires_at=now + timedelta(seconds=session.timeout)
    )


class Connection:
    """A session's compute as this process reaches it; `session` may be older than the record."""

    def __init__(self, session: Session, instance: Instance, link: Link) -> None:
        self.session = session
        self.instance = instance
        self.link = link
        self.seen = float("-inf")
        """When the instance was last looked at."""


class Connections:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        pool: Pool,
        templates: Templates,
        leases: Leases,
        background: BackgroundTasks,
        clock: Clock,
        settings: SessionSettings,
        node_id: str,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._store = store
        self._driver = driver
        self._pool = pool
        self._templates = templates
        self._checkpoints = checkpoints
        self._leases = leases
        self._background = background
        self._clock = clock
        self._node_id = node_id
        self._connections: dict[str, Connection] = {}
        self._condemned: set[str] = set()
        """Instances whose executor violated the protocol, until they are destroyed."""
        self._recovering: dict[str, tuple[asyncio.Future[Connection], datetime | None]] = {}
        self.reconnected: Callable[[Connection], None] = lambda connection: None
        """Told when an instance is reached that may have results of before."""
        self.kept: Callable[[Session], None] = lambda session: None
        """Told of each session that is reached."""
        self.equip: Callable[[Session], Awaitable[Session]] = _as_it_is
        """Gives a session what it must have before an instance is made for it."""
        self.admit: Callable[[Session], Awaitable[None]] = _let_in
        """Refuses a session at rest for whose instance this node has no room."""
        self.touched: Callable[[Session], None] = lambda session: None
        """Told of each session that something is asked of."""
        self.halt: Callable[[Session], Awaitable[Session]] = _as_it_is
        """Finishes the stop of a session that is `stopping`."""

    async def session(self, session_id: str) -> Session:
        session = await self._store.sessions.get(session_id)
        if session is None:
            raise NotFound(f"No session has the id {session_id}.", code="session_not_found")
        return session

    def reachable(self, session_id: str) -> Connection | None:
        """The session's compute if this process reaches it right now."""
        connection = self._connections.get(session_id)
        return connection if connection is not None and connection.link.alive else None

    @property
    def count(self) -> int:
        return len(self._connections)

    def sessions(self) -> set[str]:
        """Those that this process has a link to."""
        return set(self._connections)

    async def get(self, session_id: str, *, asked_at: datetime | None = None) -> Connection:
        """
        The session's compute, brought back once if it has died. One that is paused or at rest is
        started, unless it was told not to, or by what was asked for (`asked_at`) before it rested.
        """
        connection = self._connections.get(session_id)
        if connection is not None and connection.link.alive:
            self.touched(connection.session)
            if self._clock.monotonic() - connection.seen < PROBE_INTERVAL:
                return connection
            if await self._is_there(connection):
                return connection
        if asked_at is None and not may_start.get():
            session = await self._unended(session_id)
            if session.wanted is not Wanted.RUNNING:
                raise _not_running(session, "Start it with a key that may do more than read.")
        while True:
            recovering, theirs = self._recovering.get(session_id) or self._start_recovery(
                session_id, asked_at
            )
            try:
                return await asyncio.shield(recovering)
            except SessionNotRunning:
                if asked_at is not None or theirs is None:
                    raise
                # Refused to something older; this may start it.

    def _start_recovery(
        self, session_id: str, asked_at: datetime | None
    ) -> tuple[asyncio.Future[Connection], datetime | None]:
        task = self._background.start(self._recover(session_id, asked_at), f"recover {session_id}")
        self._recovering[session_id] = task, asked_at
        task.add_done_callback(lambda _: self._recovering.pop(session_id, None))
        return task, asked_at

    async def _is_there(self, connection: Connection) -> bool:
        """Whether the instance lives, as far as can be told in a short time."""
        # Before the first await: who comes meanwhile does not ask as well.
        connection.seen = self._clock.monotonic()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                state = (await self._driver.observe(connection.instance.handle)).state
        except (TimeoutError, TemporaryError) as error:
            # What it is like is not known: its link will tell, as it would without this look.
            log.warning("instance.not_observed", session_id=connection.session.id, error=str(error))
            return True
        if state in (State.RUNNING, State.UNKNOWN):
            return True
        connection.link.close()
        self._drop(connection)
        return False

    async def reach(self, session_id: str) -> Connection | None:
        """The session's compute as it is; None when it has died, or was never there."""
        connection = self.reachable(session_id)
        if connection is not None:
            return connection
        session = await self._unended(session_id)
        return await self._found(session) if session.status in UP else None

    async def usable(self, session_id: str) -> Session:
        """A session that has not ended and is on a node that this replica reaches."""
        session = await self._unended(session_id)
        self.check_here(session)
        return session

    async def startable(self, session_id: str) -> Session:
        """The same, of one that runs or that a request may start."""
        session = await self.usable(session_id)
        if session.wanted is not Wanted.RUNNING and not session.auto_start:
            raise _not_running(session)
        if session.rested_at is not None:
            # Said at once, so that it can be asked of another node.
            await self.admit(session)
        return session

    def check_here(self, session: Session) -> None:
        if session.runtime_node != self._node_id:
            raise NodeUnreachable(
                f"Session {session.id} is on node {session.runtime_node}, which cannot be reached "
                f"from here ({self._node_id}). Ask a control plane there.",
            )

    async def _recover(self, session_id: str, asked_at: datetime | None) -> Connection:
        try:
            session = await self._wanting(await self._unended(session_id), asked_at)
            self.touched(session)
            if session.status in (SessionStatus.CREATING, SessionStatus.RUNNING):
                connection = await self._found(session)
                if connection is not None:
                    return connection
            owner = f"{self._leases.replica}/{session_id}"
            async with self._leases.lease(instance_lease(session_id), owner):
                # Another replica may have been quicker.
                session = await self._wanting(await self._unended(session_id), asked_at)
                return await self._bring_up(session)
        except (ProtocolViolation, *NOT_OF_THE_SESSION):
            raise
        except (PermanentError, TemporaryError) as error:
            raise SessionNotReady(f"Session {session_id} is not ready: {error.message}") from error

    async def bring_up(self, session_id: str) -> Connection:
        """For whoever has the lease of the instance: the session's compute, made if need be."""
        return await self._bring_up(await self._unended(session_id))

    async def _bring_up(self, session: Session) -> Connection:
        if session.status is SessionStatus.STOPPING:
            session = await self.halt(session)
        connection = await self._found(session, wake=True) if session.status in UP else None
        if connection is not None:
            if session.status is not SessionStatus.RUNNING:
                self._renew(connection, await self._stored(_running(session, self._clock.now())))
            return connection
        if session.instance_id is not None:
            log.warning(
                "session.instance_lost", session_id=session.id, instance_id=session.instance_id
            )
        if session.rested_at is not None:
            await self.admit(session)
        try:
            session = await self._begun(await self._without_instance(session))
            return await self._start_again(await self.equip(session))
        except Conflict:
            # Ended meanwhile, or the replica that was making it has made it.
            connection = await self._found(await self._unended(session.id))
            if connection is None:
                raise
            return connection

    async def _wanting(self, session: Session, asked_at: datetime | None) -> Session:
        """The session, wanted to run."""
        while session.wanted is not Wanted.RUNNING:
            if not _may_start(session, asked_at):
                raise _not_running(session)
            self.check_here(session)
            now = self._clock.now()
            try:
                return await self._store.sessions.save(
                    dataclasses.replace(
                        still_up(session, now),
                        wanted=Wanted.RUNNING,
                        failures=0,
                        retry_at=None,
                        active_at=now,
                        updated_at=now,
                    )
                )
            except Conflict:
                session = await self._unended(session.id)
        return session

    async def _without_instance(self, session: Session) -> Session:
        """One whose instance has died: on its way to another, whoever comes to make it."""
        lost = session.instance_id
        if lost is None:
            return session
        fresh = session.status is SessionStatus.CREATING
        session = await self._stored(
            dataclasses.replace(
                session,
                status=SessionStatus.CREATING if fresh else SessionStatus.STARTING,
                instance_id=None,
                updated_at=self._clock.now(),
            )
        )
        await self.remove_instance(lost)
        return session

    async def _begun(self, session: Session) -> Session:
        """One that was at rest, as one that is about to run: with a new life."""
        if session.rested_at is None:
            return session
        now = self._clock.now()
        restored = session.workspace is None and session.workspace_mode is WorkspaceMode.SYNC
        return await self._stored(
            dataclasses.replace(
                session,
                status=SessionStatus.RESTORING if restored else SessionStatus.STARTING,
                rested_at=None,
                cause=None,
                message=None,
                active_at=now,
                expires_at=now + timedelta(seconds=session.timeout),
                updated_at=now,
            )
        )

    async def _stored(self, session: Session) -> Session:
        event = session_event(session, session.updated_at)
        return await self._store.sessions.save(session, event=event)

    async def _unended(self, session_id: str) -> Session:
        session = await self.session(session_id)
        if session.status.ended:
            raise SessionEnded(
                f"Session {session_id} has ended ({session.status}).",
                status_now=session.status.value,
            )
        return session

    async def _found(self, session: Session, *, wake: bool = False) -> Connection | None:
        """The session's instance, reached again if it lives; with `wake`, also if it is paused."""
        self.check_here(session)
        if session.instance_id is None:
            return None
        instance = await self._store.instances.get(session.instance_id)
        if instance is None or instance.id in self._condemned:
            return None
        state = await self.state(instance.handle)
        if state is State.PAUSED and wake:
            await self._driver.resume(instance.handle)
        elif state is not State.RUNNING:
            return None
        try:
            return await self._reconnect(session, instance)
        except ProtocolViolation as violation:
            await self._condemn(session.id, instance, violation)
            raise
        except LinkLost:
            if not await self._is_ending(instance):
                raise
            return None

    async def state(self, handle: Handle) -> State:
        """What an instance is like; `TemporaryError` when the driver does not say so soon."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                state = (await self._driver.observe(handle)).state
        except TimeoutError:
            state = State.UNKNOWN
        if state is State.UNKNOWN:
            # Not to be taken for dead: there would be two in one workspace.
            raise TemporaryError(
                f"What has become of instance {handle.instance_id} is not known.",
                code="instance_not_observed",
            )
        return state

    async def _is_ending(self, instance: Instance) -> bool:
        """Whether it goes right now: a process that ends closes its socket a moment before."""
        for _ in range(ENDING_LOOKS):
            if await self.state(instance.handle) is not State.RUNNING:
                return True
            await asyncio.sleep(ENDING_PAUSE)
        return False

    async def _reconnect(self, session: Session, instance: Instance) -> Connection:
        link = await self._driver.connect(instance.handle)
        connection = self.reachable(session.id)
        if connection is not None and connection.instance.id == instance.id:
            link.close()  # Somebody else has connected meanwhile.
            return connection
        connection = self.keep(session, instance, link)
        self.reconnected(connection)
        return connection

    async def make(self, session: Session) -> ReadyInstance:
        """
        A new instance for the session, with its workspace when it has one; one that this node does
        not have comes from its last checkpoint. For whoever has the lease of its instance.
        """
        template = await self._templates.numbered(session.template_id, session.template_version)
        prefix = session.mount_prefix
        make = functools.partial(
            self._pool.make,
            template,
            session.resources,
            session_id=session.id,
            volumes=await self._volumes(session),
            prefix=prefix,
        )
        source = None
        if session.workspace is None and prefix is None:
            source = await self._source(session)
        if session.workspace is not None:
            await self._free(session.workspace)
        try:
            ready = await make(workspace=session.workspace)
        except WorkspaceLost:
            if prefix is not None:
                # Its files are where they were; only how this node had them is gone.
                return await make(workspace=None)
            if self._checkpoints is None:
                raise
            if await self._checkpoints.get(session.id) is None:
                raise
            source = session.id
            ready = await make(workspace=None)
        if source is not None and self._checkpoints is not None:
            return await self._filled(self._checkpoints, source, ready, make)
        return ready

    async def _filled(
        self,
        checkpoints: Checkpoints,
        source: str,
        ready: ReadyInstance,
        make: Callable[..., Awaitable[ReadyInstance]],
    ) -> ReadyInstance:
        """An instance with the files of session `source`: this one, or another if need be."""

        async def again() -> Link:
            nonlocal ready
            await asyncio.shield(self._pool.destroy(ready))
            ready = await make(workspace=None)
            return ready.link

        try:
            restored = await checkpoints.restore(source, ready.link, again)
        except BaseException:
            await asyncio.shield(self._pool.destroy(ready))
            raise
        if not restored.older:
            return ready
        backup = restored.backup
        words = (
            "The last save of the workspace is missing or damaged in the blob store; the files are "
            f"those of save {backup.number}, of {backup.created_at:%Y-%m-%d %H:%M:%S} UTC."
        )
        return dataclasses.replace(ready, warnings=(Warning("older_backup", words),))

    async def _free(self, workspace: str) -> None:
        """Remove instances that a process which died in the middle left with the workspace."""
        for handle in await self._driver.handles():
            if self._driver.workspace_of(handle) == workspace:
                log.warning("instance.left_behind", instance_id=handle.instance_id)
                await self._driver.destroy(handle)
                await self._store.instances.remove(handle.instance_id)

    async def _source(self, session: Session) -> str | None:
        """Whose checkpoint a session begins with that has no files on this node."""
        if session.status is SessionStatus.CREATING:
            return session.started_from
        if self._checkpoints is None:
            return None
        if await self._checkpoints.get(session.id) is not None:
            return session.id
        # One that was never saved was lost with its node as it had begun.
        source = session.started_from
        if source is None or await self._checkpoints.get(source) is None:
            return None
        return source

    async def _volumes(self, session: Session) -> tuple[tuple[Volume, VolumeMount], ...]:
        found = []
        for mount in session.volumes:
            volume = await self._store.volumes.get(mount.volume_id)
            if volume is None:
                raise PermanentError(f"Volume {mount.volume_id} is gone.", code="volume_not_found")
            found.append((volume, mount))
        return tuple(found)

    async def _start_again(self, session: Session) -> Connection:
        ready = await self.make(session)
        running = dataclasses.replace(
            _running(session, self._clock.now()),
            instance_id=ready.instance.id,
            workspace=ready.instance.workspace,
            warnings=_added(session.warnings, _restored(session, ready) + ready.warnings),
        )
        try:
            session = await self._stored(running)
        except Conflict:
            # Not written: what was made for it is nobody's, but for a workspace that it had.
            ready.link.close()
            made = ready.instance.workspace != session.workspace
            await asyncio.shield(self._pool.clear(ready.instance.id, workspace_too=made))
            raise
        except BaseException:
            ready.link.close()
            await asyncio.shield(self._pool.clear(ready.instance.id, workspace_too=False))
            raise
        connection = self.keep(session, ready.instance, ready.link)
        # It has the journal of the one before.
        self.reconnected(connection)
        return connection

    def keep(self, session: Session, instance: Instance, link: Link) -> Connection:
        """Reach the session by this link from now on."""
        connection = self._connections[session.id] = Connection(session, instance, link)
        # Another replica may have ended the session: nobody here would hear of it otherwise.
        link.closed.add_done_callback(lambda _: self._link_closed(connection))
        self.attend(session, link)
        self.kept(session)
        return connection

    def attend(self, session: Session, link: Link) -> None:
        """Let the executor know when the session ends, in case that no replica is left then."""
        link.announce_end(max(0.0, (session.expires_at - self._clock.now()).total_seconds()))

    async def announce(self, session: Session) -> None:
        """
        Have whatever is run from now on run by this edition of the session or a later one, by other
        replicas too: they are refused by the executor until they have read it.
        """
        connection = self.reachable(session.id)
        if connection is None:
            # Not `reach`: the session may have ended already, because of the very change.
            stored = await self.session(session.id)
            connection = await self._found(stored) if stored.status in UP else None
        if connection is None:
            return  # Its next instance starts by what is stored.
        self._renew(connection, session)
        try:
            await connection.link.call("edition", edition=session.version)
        except ExecutorError as error:
            # One of before an upgrade, which takes what it is given.
            log.warning("session.not_announced", session_id=session.id, error=error.message)

    async def renew(self, connection: Connection) -> None:
        """Read a session anew of which the executor has seen a later edition."""
        before = connection.session.version
        self._renew(connection, await self._unended(connection.session.id))
        if connection.session.version == before:
            # The database was put back to what it was before: it is the truth all the same.
            await connection.link.call("edition", edition=before, reset=True)

    def _renew(self, connection: Connection, session: Session) -> None:
        if session.version > connection.session.version:
            if session.expires_at != connection.session.expires_at:
                self.attend(session, connection.link)
            connection.session = session

    def _link_closed(self, connection: Connection) -> None:
        self._drop(connection)
        violation = connection.link.violation
        if violation is not None and connection.instance.id not in self._condemned:
            # Before the task runs: nobody is to reach it again meanwhile.
            self._condemned.add(connection.instance.id)
            work = self._condemn(connection.session.id, connection.instance, violation)
            self._background.start(work, f"destroy {connection.instance.id}")

    async def _condemn(
        self, session_id: str, instance: Instance, violation: ProtocolViolation
    ) -> None:
        """Destroy an instance whose executor is not to be trusted; the session gets another."""
        log.warning(
            "instance.condemned",
            session_id=session_id,
            instance_id=instance.id,
            cause=Cause.PROTOCOL,
            error=violation.message,
        )
        self._condemned.add(instance.id)
        try:
            await self._driver.destroy(instance.handle)
        finally:
            self._condemned.discard(instance.id)

    def _drop(self, connection: Connection) -> None:
        if self._connections.get(connection.session.id) is connection:
            del self._connections[connection.session.id]

    async def remove_instance(self, instance_id: str) -> None:
        instance = await self._store.instances.get(instance_id)
        if instance is not None:
            await self._driver.destroy(instance.handle)
            await self._store.instances.remove(instance_id)

    def let_go(self, session_id: str) -> None:
        """Close the link to a session that has ended."""
        connection = self._connections.pop(session_id, None)
        if connection is not None:
            connection.link.close()

    async def close(self) -> None:
        """Let go of the links; the instances stay."""
        for connection in self._connections.values():
            connection.link.close()


def _may_start(session: Session, asked_at: datetime | None) -> bool:
    """Whether what was asked for then, or now, has a session run that is not to."""
    rested = session.rested_at
    if asked_at is not None and (rested is None or rested >= asked_at):
        # It ran when that was accepted. Only who stopped it can have meant that too: what stands
        # still for it would never end, and who found it idle came too early.
        return rested is None or session.cause is Cause.IDLE
    return session.auto_start


def _not_running(session: Session, advice: str = "Start it first.") -> Conflict:
    return SessionNotRunning(
        f"Session {session.id} is {session.status}. {advice}",
        status_now=session.status.value,
    )


async def _as_it_is(session: Session) -> Session:
    return session


async def _let_in(session: Session) -> None:
    return


def _running(session: Session, now: datetime) -> Session:
    return dataclasses.replace(
        still_up(session, now),
        status=SessionStatus.RUNNING,
        cause=None,
        message=None,
        failures=0,
        retry_at=None,
        updated_at=now,
    )


def _restored(session: Session, ready: ReadyInstance) -> tuple[Warning, ...]:
    if session.workspace in (None, ready.instance.workspace):
        return ()
    words = "The workspace was lost with its node's disk; its files are those of the last save."
    return (Warning("workspace_restored", words),)


def _added(warnings: tuple[Warning, ...], new: tuple[Warning, ...]) -> tuple[Warning, ...]:
    """A new one takes the place of those with its code."""
    codes = {warning.code for warning in new}
    return tuple(warning for warning in warnings if warning.code not in codes) + new
