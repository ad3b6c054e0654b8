"""
Connections to running sessions.

The store is the truth; a connection caches how to reach what the store records, and is dropped with
its link. `reachable` and `probe` use open connections alone, `reach` and `open_recorded` also open
one to an existing instance, and `SessionStarter.connect` starts the session if need be.

An instance is probed before it is trusted, at most once in `PROBE_INTERVAL`. An executor that
violates the protocol is not trusted again: its instance is destroyed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.link.errors import ExecutorError, LinkLost, ProtocolViolation
from atoll.model.instance import State
from atoll.model.session import Cause, Session
from atoll.service.sessions.instances import PROBE_TIMEOUT
from atoll.service.sessions.observers import SessionObserver
from atoll.service.sessions.pausing_and_resizing import resume_instance

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Instance
    from atoll.service.replica import Replica
    from atoll.service.sessions.instances import SessionInstances
    from atoll.service.sessions.observers import SessionObservers
    from atoll.service.sessions.records import SessionRecords

log = structlog.get_logger(__name__)

PROBE_INTERVAL = 1.0
"""Seconds for which the last probe of an instance counts."""
EXIT_PROBES = 100
EXIT_PROBE_PAUSE = 0.01
"""Seconds between the probes that determine whether an instance without a link is exiting."""


class Connection:
    """How this replica reaches a running session; `session` may be older than the record."""

    def __init__(self, session: Session, instance: Instance, link: Link) -> None:
        self.session = session
        self.instance = instance
        self.link = link
        self.probed_at = float("-inf")


class Connections(SessionObserver):
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        records: SessionRecords,
        instances: SessionInstances,
        observers: SessionObservers,
    ) -> None:
        self._replica = replica
        self._clock = replica.clock
        self._driver = driver
        self._records = records
        self._instances = instances
        self._observers = observers
        self._connections: dict[str, Connection] = {}
        self._distrusted: set[str] = set()
        """Instances whose executor violated the protocol, until they are destroyed."""
        observers.subscribe(self)

    # Existing connections

    def reachable(self, session_id: str) -> Connection | None:
        """The connection, if its link is alive right now."""
        connection = self._connections.get(session_id)
        return connection if connection is not None and connection.link.alive else None

    @property
    def count(self) -> int:
        return len(self._connections)

    def session_ids(self) -> set[str]:
        return set(self._connections)

    async def probe(self, session_id: str) -> Connection | None:
        """
        The connection, if its link is alive and its instance runs. The driver is asked at most once
        in `PROBE_INTERVAL`; if it does not know, the connection counts as good.
        """
        connection = self.reachable(session_id)
        if connection is None:
            return None
        if self._clock.monotonic() - connection.probed_at < PROBE_INTERVAL:
            return connection
        # Before the first await: a request that comes meanwhile does not probe as well.
        connection.probed_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                state = (await self._driver.observe(connection.instance.handle)).state
        except (TimeoutError, TemporaryError) as error:
            # Trust it as if it had not been probed: its link breaks if it is dead.
            log.warning("instance.not_observed", session_id=session_id, error=str(error))
            return connection
        if state in (State.RUNNING, State.UNKNOWN):
            return connection
        connection.link.close()
        self._drop(connection)
        return None

    async def reach(self, session_id: str) -> Connection | None:
        """A connection to the instance that the session has; None if that does not run."""
        connection = self.reachable(session_id)
        if connection is not None:
            return connection
        session = await self._records.unended(session_id)
        return await self.open_recorded(session) if session.status.keeps_instance else None

    async def open_recorded(self, session: Session, *, resume: bool = False) -> Connection | None:
        """
        Connect to the instance that the session's record names; None if it does not run. With
        `resume`, a paused instance is resumed.
        """
        self._records.check_here(session)
        instance = await self._instances.of(session)
        if instance is None or instance.id in self._distrusted:
            return None
        state = await self._instances.state(instance.handle)
        if state is State.PAUSED and resume:
            await resume_instance(self._driver, instance.handle)
        elif state is not State.RUNNING:
            return None
        try:
            return await self._connect(session, instance)
        except ProtocolViolation as violation:
            await self._distrust(session.id, instance, violation)
            raise
        except LinkLost:
            if not await self._is_exiting(instance):
                raise
            return None

    async def _connect(self, session: Session, instance: Instance) -> Connection:
        link = await self._driver.connect(instance.handle)
        connection = self.reachable(session.id)
        if connection is not None and connection.instance.id == instance.id:
            link.close()  # Another request has connected meanwhile.
            return connection
        return self.keep(session, instance, link)

    async def _is_exiting(self, instance: Instance) -> bool:
        """A process that exits closes its socket a moment before."""
        for _ in range(EXIT_PROBES):
            if await self._instances.state(instance.handle) is not State.RUNNING:
                return True
            await asyncio.sleep(EXIT_PROBE_PAUSE)
        return False

    def keep(self, session: Session, instance: Instance, link: Link) -> Connection:
        connection = self._connections[session.id] = Connection(session, instance, link)
        # Another replica may be ending the session; the closed link is the only sign of that on
        # this replica.
        link.closed.add_done_callback(lambda _: self._link_closed(connection))
        self._announce_end(session, link)
        self._observers.session_changed(session)
        self._observers.session_connected(connection)
        return connection

    def _announce_end(self, session: Session, link: Link) -> None:
        """
        Report the session's end to the executor, so that it ends its instance in time even if no
        replica is running then.
        """
        link.announce_end(max(0.0, (session.expires_at - self._clock.now()).total_seconds()))

    # Changed sessions

    async def announce(self, session: Session) -> None:
        """
        Have everything that starts from now on use this version of the session or a later one. The
        executor refuses other replicas until they have read it.
        """
        connection = self.reachable(session.id)
        if connection is None:
            # Not `reach`: the session may have ended already, because of this change.
            stored = await self._records.get(session.id)
            connection = await self.open_recorded(stored) if stored.status.keeps_instance else None
        if connection is None:
            return  # The next instance starts with what is stored.
        self.update(connection, session)
        try:
            await connection.link.call("edition", edition=session.version)
        except ExecutorError as error:
            # The executor is older than this request.
            log.warning("session.not_announced", session_id=session.id, error=error.message)

    async def refresh(self, connection: Connection) -> None:
        """Read the session again after its executor has refused an outdated version of it."""
        before = connection.session.version
        self.update(connection, await self._records.unended(connection.session.id))
        if connection.session.version == before:
            # The database was restored from a backup, and is authoritative.
            await connection.link.call("edition", edition=before, reset=True)

    def update(self, connection: Connection, session: Session) -> None:
        """Give the connection a newer version of its session."""
        if session.version > connection.session.version:
            if session.expires_at != connection.session.expires_at:
                self._announce_end(session, connection.link)
            connection.session = session

    # Ends

    def _link_closed(self, connection: Connection) -> None:
        self._drop(connection)
        violation = connection.link.violation
        if violation is not None and connection.instance.id not in self._distrusted:
            # Before the task runs: nothing may connect to it meanwhile.
            self._distrusted.add(connection.instance.id)
            work = self._distrust(connection.session.id, connection.instance, violation)
            self._replica.background.start(work, f"destroy {connection.instance.id}")

    async def _distrust(
        self, session_id: str, instance: Instance, violation: ProtocolViolation
    ) -> None:
        """Destroy the instance; the session gets another one when it is needed."""
        log.warning(
            "instance.distrusted",
            session_id=session_id,
            instance_id=instance.id,
            cause=Cause.PROTOCOL,
            error=violation.message,
        )
        self._distrusted.add(instance.id)
        # If this fails it stays distrusted; the next instance for its workspace removes it.
        await self._driver.destroy(instance.handle)
        self._distrusted.discard(instance.id)

    def _drop(self, connection: Connection) -> None:
        if self._connections.get(connection.session.id) is connection:
            del self._connections[connection.session.id]

    def session_ended(self, session: Session) -> None:
        self.disconnect(session.id)

    def disconnect(self, session_id: str) -> None:
        connection = self._connections.pop(session_id, None)
        if connection is not None:
            connection.link.close()

    async def close(self) -> None:
        """Close the links; the instances stay."""
        for connection in self._connections.values():
            connection.link.close()
