"""
What is wanted of sessions that are there: to run, to stand still, to rest, to be other than they
are.

What is asked for is written down as wanted, and `steps` brings it about; who asked waits for that
as long as it likes. What is due by itself (the end of its life, a stop because nobody needs it) is
due by a timer here, or by the sweep where this replica could not.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, InvalidRequest, SessionNotRunning
from atoll.model import plan
from atoll.model.event import session_event
from atoll.model.execution import ExecutionStatus
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.service.sessions.connections import still_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.resources import Resources
    from atoll.service.background import BackgroundTasks
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.service import Sessions
    from atoll.service.templates.service import Templates
    from atoll.settings import Settings
    from atoll.stores.base import Store

FAR = 86_400.0
"""Seconds beyond which a timer is left to the sweep."""


MOST = {"env_vars": 256, "labels": 64}
"""How many of these a session may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What of a session is to be other than it is."""

    limits: Callable[[Resources], Resources]
    timeout: int | None = None
    """Seconds of life from now on."""
    env_vars: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """By name; none removes one."""
    labels: dict[str, str | None] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that are replaced as they are: idle_timeout, archive_after and their like."""


class Lifecycle:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        templates: Templates,
        connections: Connections,
        sessions: Sessions,
        background: BackgroundTasks,
        clock: Clock,
        settings: Settings,
        node_id: str,
    ) -> None:
        self._store = store
        self._driver = driver
        self._templates = templates
        self._connections = connections
        self._sessions = sessions
        connections.kept = sessions.schedule = self.schedule
        self._background = background
        self._clock = clock
        self._settings = settings
        self._node_id = node_id
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # What is due by itself

    def schedule(self, session: Session) -> None:
        """See to the session when its next timer runs out; the sweep does where this could not."""
        old = self._timers.pop(session.id, None)
        if old is not None:
            old.cancel()
        at = plan.timer_at(session)
        left = FAR if at is None else (at - self._clock.now()).total_seconds()
        if left < FAR:
            self._timers[session.id] = asyncio.get_running_loop().call_later(
                max(0.0, left), self._start_timer, session.id
            )

    def _start_timer(self, session_id: str) -> None:
        self._timers.pop(session_id, None)
        self._background.start(self._timed_out(session_id), f"timer of {session_id}")

    async def _timed_out(self, session_id: str) -> None:
        if await self.tick(session_id):
            settled = await self._sessions.settle(session_id)
            if settled is not None:
                self.schedule(settled)

    async def tick(self, session_id: str) -> bool:
        """Want what is due by itself, if it is; whether somebody has to bring that about."""
        while True:
            session = await self._connections.session(session_id)
            if session.runtime_node != self._node_id:
                return False
            try:
                return await self._tick(session)
            except Conflict:
                continue  # It moved on meanwhile, and may have been given more time.

    async def _tick(self, session: Session) -> bool:
        now, timer = self._clock.now(), plan.timer(session)
        at = plan.timer_at(session)
        if at is None or at > now:
            # The clock went back, or the session was given more time.
            self.schedule(session)
        elif session.rested_at is None and (timer is None or timer.cause is Cause.TIMEOUT):
            await self._sessions.end(session, SessionStatus.TIMEOUT, Cause.TIMEOUT, None)
        elif timer is None or timer.wanted is Wanted.DESTROYED:
            await self._sessions.end(session, SessionStatus.TERMINATED, Cause.IDLE, None)
        elif timer.wanted is Wanted.STOPPED and await self._busy(session.id):
            await self._store.sessions.seen(session, now)
            self.schedule(dataclasses.replace(session, active_at=now))
        else:
            await self._want(session.id, timer.wanted, timer.cause, of=session)
            if timer.wanted is Wanted.STOPPED and await self._busy(session.id):
                # It came while nothing was found; what comes from now on starts it by itself.
                await self._want(session.id, Wanted.RUNNING, None)
            return True
        return False

    async def _busy(self, session_id: str) -> bool:
        """Whether something runs in it or waits to."""
        for status in (ExecutionStatus.RUNNING, ExecutionStatus.PENDING):
            found = await self._store.executions.page(session_id=session_id, status=status, limit=1)
            if found.items:
                return True
        return False

    # What is wanted of it

    async def start(self, session_id: str, *, wait: float) -> Session:
        """Have it run, whatever it is now."""
        await self._want(session_id, Wanted.RUNNING, None)
        return await self._settled(session_id, wait)

    async def stop(self, session_id: str, *, wait: float) -> Session:
        """End its instance and keep its files; what runs in it is cancelled."""
        await self._want(session_id, Wanted.STOPPED, Cause.USER)
        return await self._settled(session_id, wait)

    async def archive(self, session_id: str, *, wait: float) -> Session:
        """Stop it, and have its files in the blob store alone."""
        await self._want(session_id, Wanted.ARCHIVED, Cause.USER)
        return await self._settled(session_id, wait)

    async def pause(self, session_id: str, *, wait: float) -> Session:
        """Let it stand still with its memory; not while something runs in it."""
        if "pause" not in self._driver.capabilities.features:
            raise Conflict(
                f"Node {self._node_id} cannot let instances stand still; stop the session instead.",
                code="pause_unavailable",
            )
        session = await self._connections.usable(session_id)
        if session.wanted not in (Wanted.RUNNING, Wanted.PAUSED) or session.rested_at is not None:
            raise _not_running(session)
        if await self._busy(session_id):
            raise _busy(session_id)
        await self._want(session_id, Wanted.PAUSED, None)
        session = await self._settled(session_id, wait)
        if session.wanted is not Wanted.PAUSED:
            raise _busy(session_id)
        return session

    async def _want(
        self, session_id: str, wanted: Wanted, cause: Cause | None, *, of: Session | None = None
    ) -> Session:
        """
        Write down what is wanted; of a session that has not moved on since `of` was read, if that
        is given. One that is at rest and to be stopped is left as it is.
        """
        while True:
            session = of or await self._connections.usable(session_id)
            if session.status is SessionStatus.CREATING and wanted is not Wanted.RUNNING:
                raise _not_running(session)
            resting = session.wanted in (Wanted.STOPPED, Wanted.ARCHIVED)
            if session.wanted is wanted or (wanted is Wanted.STOPPED and resting):
                if session.retry_at is None:
                    return session
                # Who asks again does not want to wait for the next try.
                wanted = session.wanted
            now = self._clock.now()
            rests = wanted in (Wanted.STOPPED, Wanted.ARCHIVED)
            base = session if rests else still_up(session, now)
            changed = dataclasses.replace(
                base,
                wanted=wanted,
                cause=(session.cause or cause) if resting else cause,
                rested_at=(session.rested_at or now) if rests else base.rested_at,
                failures=0,
                retry_at=None,
                active_at=session.active_at if rests else now,
                updated_at=now,
            )
            try:
                event = session_event(changed, now, "wanted")
                return await self._store.sessions.save(changed, event=event)
            except Conflict:
                if of is not None:
                    raise

    async def _settled(self, session_id: str, wait: float) -> Session:
        """The session when it is what is wanted, or as it is after so many seconds."""
        settling = self._background.start(self._sessions.settle(session_id), f"settle {session_id}")
        wait = min(wait, self._settings.execution.max_wait.total_seconds())
        done, _ = await asyncio.wait([settling], timeout=wait)
        if done:
            settling.result()
        session = await self._connections.session(session_id)
        self.schedule(session)
        return session

    async def update(self, session_id: str, change: Change) -> Session:
        """Change a session that is there; what runs next runs by it."""
        while True:
            session = await self._connections.usable(session_id)
            changed = await self.changed(session, change)
            try:
                event = session_event(changed, changed.updated_at, "updated")
                changed = await self._store.sessions.save(changed, event=event)
                break
            except Conflict:
                continue  # It moved on meanwhile; once more on what it is now.
        self.schedule(changed)
        await self._connections.announce(changed)
        return changed

    async def changed(self, session: Session, change: Change) -> Session:
        """The session as it is to be; limits of its instance are set."""
        now = self._clock.now()
        given: dict[str, Any] = dict(change.fields)
        if change.timeout is not None:
            seconds = self._sessions.life(change.timeout)
            given |= {"timeout": seconds, "expires_at": now + timedelta(seconds=seconds)}
        for name, values in (("env_vars", change.env_vars), ("labels", change.labels)):
            if values:
                merged = {**getattr(session, name), **values}
                given[name] = {key: value for key, value in merged.items() if value is not None}
                if len(given[name]) > MOST[name]:
                    raise InvalidRequest(f"{name}: at most {MOST[name]} in all.", field=name)
        if both := sorted(given.get("env_vars", {}).keys() & session.secrets.keys()):
            raise InvalidRequest(
                f"env_vars.{both[0]}: a secret has this name; remove it first.", field="env_vars"
            )
        resources = change.limits(session.resources)
        if resources != session.resources:
            await self._templates.check_resources(resources)
            await self._resize(session, resources)
            given["resources"] = resources
        return dataclasses.replace(session, **given, updated_at=now)

    async def _resize(self, session: Session, resources: Resources) -> None:
        """Set the limits of its instance; the next one begins with them."""
        if session.workspace is not None and resources.disk != session.resources.disk:
            raise Conflict(
                f"The workspace of session {session.id} has its size as long as it is on its node; "
                "archive the session, change it, and start it again.",
                code="disk_fixed",
            )
        if session.instance_id is None:
            return
        instance = await self._store.instances.get(session.instance_id)
        if instance is not None and not await self._driver.resize(instance.handle, resources):
            raise Conflict(
                f"Session {session.id} cannot be given other limits while it runs; stop it first.",
                code="resize_unavailable",
            )

    async def close(self) -> None:
        """Wait for no timer any more."""
        for timer in self._timers.values():
            timer.cancel()


def _not_running(session: Session) -> Conflict:
    return SessionNotRunning(
        f"Session {session.id} is {session.status}.",
        status_now=session.status.value,
    )


def _busy(session_id: str) -> Conflict:
    return Conflict(
        f"Something runs in session {session_id}, or waits to; let it end, or cancel it.",
        code="session_busy",
    )
