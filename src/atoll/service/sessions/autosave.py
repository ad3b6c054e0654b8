"""
When workspaces are saved.

With a blob store elsewhere a session's workspace is saved a moment after an execution has ended or
a file was written, now and then while something runs for long, and when the session ends. Where the
blobs are on the node's own disk, a copy beside the workspace protects from nothing: then only what
was asked for is saved, and at the end what its owner may still come for.

A session with durability `execution` is saved before each result is final. A save that fails is no
reason to fail what ran: the session says so in its warnings until one succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, CheckpointNotFound, Conflict, NodeUnreachable, TemporaryError
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.instance import State
from atoll.model.session import Cause, Durability, SessionStatus, Warning, WorkspaceMode
from atoll.service.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.checkpoint import Checkpoint
    from atoll.model.instance import Instance
    from atoll.model.session import Session
    from atoll.service.background import BackgroundTasks
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.sessions.connections import Connection, Connections
    from atoll.settings import WorkspaceSettings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

NOT_SAVED = "workspace_not_saved"
AWAY = "The blob store does not answer: the files are on the node's disk alone until it does."
LOOK_SECONDS = 5.0
TRIES = 5
"""For a warning that others write at the same time."""

SAVE_TIMEOUT = 7200.0
"""Seconds that one checkpoint may take."""


class Autosave:
    def __init__(
        self,
        checkpoints: Checkpoints,
        store: Store,
        driver: Driver,
        connections: Connections,
        background: BackgroundTasks,
        clock: Clock,
        settings: WorkspaceSettings,
        *,
        remote: bool,
        away: Callable[[], str | None] = lambda: None,
        embedded: bool = False,
    ) -> None:
        """
        `remote`: the blobs are not on the node's own disk; `away` says why they cannot be reached,
        if they cannot.
        """
        self._checkpoints = checkpoints
        self._store = store
        self._driver = driver
        self._connections = connections
        self._background = background
        self._clock = clock
        self._settings = settings
        self._remote = remote
        self._away = away
        self._embedded = embedded
        self._activity: dict[str, int] = {}
        """How often something began or ended in sessions that are not saved as they are."""
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._saving: set[str] = set()
        self._leaving: dict[str, asyncio.Event] = {}
        """Sessions that have ended and are saved for the last time; set when that is over."""
        self._warned: set[str] = set()
        self._seen: set[str] = set()
        """Sessions of which it is known whether they say so."""
        self.busy: Callable[[], Collection[str]] = tuple
        """The sessions in which something runs."""
        self.resting: Callable[[str], Awaitable[None]]
        """Saves the files of a session that has no instance."""
        self.elsewhere: Callable[[Session], Awaitable[None]] = _as_it_is
        """
        Has a session of another node saved there; where that cannot be reached, what it saved last
        will have to do.
        """

    def begun(self, session: Session) -> Session:
        """A new session, with a warning if its files will be on the node's disk alone."""
        if not self._remote or self._away() is None:
            return session
        self._warned.add(session.id)
        return dataclasses.replace(session, warnings=(*session.warnings, Warning(NOT_SAVED, AWAY)))

    # What happens in sessions

    def workspace_changed(self, session_id: str) -> None:
        """Something in its workspace may have changed."""
        self._activity[session_id] = self._activity.get(session_id, 0) + 1
        if self._remote:
            self._later(session_id)

    def _later(self, session_id: str) -> None:
        if session_id not in self._due and session_id not in self._saving:
            delay = self._settings.delay.total_seconds()
            loop = asyncio.get_running_loop()
            self._due[session_id] = loop.call_later(delay, self._start, session_id)

    def _start(self, session_id: str) -> None:
        del self._due[session_id]
        self._saving.add(session_id)
        self._background.start(self._in_background(session_id), f"save {session_id}")

    async def _in_background(self, session_id: str) -> None:
        backoff = Backoff()
        try:
            while True:
                connection = self._connections.reachable(session_id)
                if connection is None or session_id not in self._activity:
                    return  # It has ended, or its next life begins with what is on the disk.
                if connection.session.workspace_mode is not WorkspaceMode.SYNC:
                    self._activity.pop(session_id)
                    return
                try:
                    await self._save(connection)
                    return
                except AtollError as error:
                    await self._warn(session_id, error.message)
                await backoff.pause()
        finally:
            self._saving.discard(session_id)
            if session_id in self._activity and self._connections.reachable(session_id) is not None:
                self._later(session_id)  # It went on meanwhile.

    async def before_result(self, connection: Connection) -> None:
        """What durability `execution` promises; a failure is told in the session."""
        self.workspace_changed(connection.session.id)
        session = connection.session
        if session.durability is not Durability.EXECUTION or (
            session.workspace_mode is not WorkspaceMode.SYNC
        ):
            return
        try:
            await self._save(connection)
        except AtollError as error:
            await self._warn(connection.session.id, error.message)

    async def now(self, session_id: str) -> Checkpoint | None:
        """Save a session's workspace; None when it is empty and always was."""
        connection = await self._connections.get(session_id)
        if connection.session.workspace_mode is not WorkspaceMode.SYNC:
            raise Conflict(
                f"The workspace of session {session_id} is in the blob store already.",
                code="workspace_mounted",
            )
        return await self._save(connection)

    async def fresh(self, session_id: str) -> None:
        """See that a session has a checkpoint to begin another with."""
        session = await self._connections.session(session_id)
        if session.rested_at is not None and not session.status.ended:
            # What is archived, or was saved when it was stopped, is as it was then.
            if not self._remote or not await self._was_saved(session):
                await self.resting(session_id)
        elif not session.status.ended:
            try:
                await self.now(session_id)
            except NodeUnreachable:
                await self.elsewhere(session)
        await self.left(session_id)
        if await self._checkpoints.get(session_id) is None:
            raise CheckpointNotFound(f"Session {session_id} left no files.")

    async def _was_saved(self, session: Session) -> bool:
        """Whether that is certain of one that rests: its stop does not wait for a save."""
        if session.status is not SessionStatus.STOPPED or session.rested_at is None:
            return True
        last = await self._checkpoints.get(session.id)
        return last is not None and last.created_at >= session.rested_at

    async def _save(self, connection: Connection) -> Checkpoint | None:
        session_id = connection.session.id
        before = self._activity.get(session_id, 0)
        taken = await self._take(session_id, connection.link)
        if self._activity.get(session_id, 0) == before:
            self._activity.pop(session_id, None)
        if self._remote:
            if session_id not in self._seen:
                # Another process, or another node, may have said so and is no more.
                self._seen.add(session_id)
                if any(warning.code == NOT_SAVED for warning in connection.session.warnings):
                    self._warned.add(session_id)
            # It is safe on the node's disk, and goes on from there when it can.
            home = await self._checkpoints.is_home(session_id)
            await self._warn(session_id, None if home else AWAY)
        return taken

    async def _take(self, session_id: str, link: Link) -> Checkpoint | None:
        before = self._activity.get(session_id, 0)
        try:
            async with asyncio.timeout(SAVE_TIMEOUT):
                return await self._checkpoints.take(
                    session_id, link, quiet=lambda: self._activity.get(session_id, 0) == before
                )
        except TimeoutError:
            raise TemporaryError(
                f"Saving session {session_id}'s workspace took longer than {SAVE_TIMEOUT:.0f} s.",
                code="save_timeout",
            ) from None

    # The end of a session

    async def last(self, session: Session) -> None:
        """Save what an ended session leaves behind, before its instance goes."""
        try:
            await self._last(session)
        finally:
            self.gone(session.id)

    def leaving(self, session_id: str) -> None:
        """A session has ended and is about to be saved for the last time, by this process."""
        self._leaving.setdefault(session_id, asyncio.Event())

    def gone(self, session_id: str) -> None:
        """That is over, whatever came of it."""
        over = self._leaving.pop(session_id, None)
        if over is not None:
            over.set()

    async def left(self, session_id: str) -> None:
        """
        Until what an ended session leaves is saved, if this process is at it: who comes at once for
        its files would else be told of none, or of old ones.
        """
        over = self._leaving.get(session_id)
        if over is not None:
            await over.wait()

    async def _last(self, session: Session) -> None:
        timer = self._due.pop(session.id, None)
        if timer is not None:
            timer.cancel()
        touched = self._activity.pop(session.id, None) is not None
        self._warned.discard(session.id)
        self._seen.discard(session.id)
        if self._embedded and not self._remote:
            return  # The blobs go with the process.
        if not self._settings.keep:
            await self._checkpoints.forget(session.id)
            return
        # A server that ends for good has many to end and little time: its own disk keeps no copies.
        in_time = self._remote or session.cause is not Cause.SHUTDOWN
        if (
            in_time
            and session.workspace_mode is WorkspaceMode.SYNC
            and (
                touched or (await self._store.executions.page(session_id=session.id, limit=1)).items
            )
        ):
            try:
                await self._save_last(session)
            except AtollError as error:
                log.warning("workspace.not_saved", session_id=session.id, error=error.message)
        until = self._clock.now() + self._settings.keep
        mounted = session.workspace_mode is WorkspaceMode.MOUNT
        await self._checkpoints.keep_until(session.id, until, mounted=mounted)

    async def _save_last(self, session: Session) -> None:
        instance = None
        if session.instance_id is not None:
            instance = await self._store.instances.get(session.instance_id)
        if instance is not None:
            state = (await self._driver.observe(instance.handle)).state
            if state is State.PAUSED:
                await self._driver.resume(instance.handle)
            if state in (State.RUNNING, State.PAUSED):
                try:
                    await self._save_within(session.id, instance)
                    return
                except LinkLost as error:
                    log.info("instance.lost", session_id=session.id, error=error.message)
        # One that has died leaves its files too.
        await self.resting(session.id)

    async def _save_within(self, session_id: str, instance: Instance) -> None:
        link = await self._driver.connect(instance.handle)
        try:
            # Its time is over: what is saved may take long, and code must not run on meanwhile.
            with contextlib.suppress(ExecutorError):  # One of before does not know the word.
                await link.call("quiet")
            await self._take(session_id, link)
        finally:
            link.close()

    # Now and then

    async def run(self) -> None:
        """Save what runs for long, and take back warnings when the blob store is back."""
        interval = self._settings.interval.total_seconds()
        since = 0.0
        while self._remote:
            await asyncio.sleep(LOOK_SECONDS)
            since += LOOK_SECONDS
            try:
                if self._away() is None:
                    for session_id in list(self._warned):
                        if await self._is_saved(session_id):
                            await self._warn(session_id, None)
            except AtollError as error:
                log.info("saves.waits", error=error.message)
            if since >= interval:
                since = 0.0
                for session_id in self.busy():
                    self._activity.setdefault(session_id, 0)
                    self._later(session_id)

    async def _is_saved(self, session_id: str) -> bool:
        """Whether nothing happened since the last save, and that is in the blob store."""
        unsaved = session_id in self._activity or session_id in self._saving
        return not unsaved and await self._checkpoints.is_home(session_id)

    # What it says of itself

    async def _warn(self, session_id: str, why: str | None) -> None:
        """Say in the session that it is not saved, or no longer say so."""
        if (why is None) != (session_id in self._warned):
            return
        if why is not None:
            log.warning("workspace.not_saved", session_id=session_id, error=why)
        for _ in range(TRIES):
            session = await self._store.sessions.get(session_id)
            if session is None or session.status.ended:
                return
            others = tuple(item for item in session.warnings if item.code != NOT_SAVED)
            said = () if why is None else (Warning(NOT_SAVED, why),)
            try:
                await self._store.sessions.save(
                    dataclasses.replace(session, warnings=others + said)
                )
                break
            except Conflict:
                continue
        (self._warned.discard if why is None else self._warned.add)(session_id)

    def close(self) -> None:
        for timer in self._due.values():
            timer.cancel()


async def _as_it_is(session: Session) -> None:
    return
