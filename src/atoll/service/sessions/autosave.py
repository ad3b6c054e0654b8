"""
Decides when checkpoints of sessions are taken. With a remote blob store: shortly after an execution
has ended or a file was written, regularly while code runs for long, and when the session ends.
If blobs are on the node's own disk, a copy next to the workspace protects from nothing: then a
checkpoint is taken on request, and at the end of a session whose files may still be requested.

A session with durability `execution` gets one before each result is committed. A failed checkpoint
does not fail the execution: the session has a warning until one succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

import structlog

from atoll.errors import (
    AtollError,
    CheckpointNotFound,
    Conflict,
    InstanceNotObserved,
    NodeUnreachable,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.session import Cause, Durability, Session, SessionStatus, Warning, WorkspaceMode
from atoll.model.session_changes import NOT_SAVED, with_warnings, without_warnings
from atoll.service.backoff import Backoff
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from atoll.link.client import Link
    from atoll.model.checkpoint import Checkpoint
    from atoll.model.instance import Instance
    from atoll.service.sessions.archive import Archiver
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.start import SessionStarter
    from atoll.settings import WorkspaceSettings

log = structlog.get_logger(__name__)

BLOBS_UNAVAILABLE = (
    "The blob store does not answer: the files are on the disk of their node alone until it does."
)
SAVE_TIMEOUT = 7200.0
"""Seconds that one checkpoint may take."""
WARNING_SWEEP = 5.0
"""Seconds between two looks for warnings that no longer hold."""
MAX_ATTEMPTS = 5
"""Attempts to write a warning to a session that others write at the same time."""


class BlobAvailability(Protocol):
    """A remote blob store that may be unavailable."""

    @property
    def away(self) -> str | None:
        """Why the store does not answer; None while it does."""


class RemoteCheckpoints(Protocol):
    """Other nodes, which save the sessions that they host."""

    async def save(self, session: Session) -> None:
        """Save the session on its node, if that can be reached."""


class Autosave(SessionObserver):
    def __init__(
        self,
        core: SessionCore,
        starter: SessionStarter,
        archiver: Archiver,
        elsewhere: RemoteCheckpoints,
        settings: WorkspaceSettings,
        *,
        remote: BlobAvailability | None,
        embedded: bool = False,
    ) -> None:
        """`remote` is None if blobs are on the node's own disk."""
        self._replica = core.replica
        self._store = core.replica.store
        self._clock = core.replica.clock
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._connections = core.connections
        self._starter = starter
        self._archiver = archiver
        self._checkpoints = core.checkpoints
        self._elsewhere = elsewhere
        self._settings = settings
        self._remote = remote
        self._embedded = embedded
        self._changes: dict[str, int] = {}
        """Changes of workspaces since their last save, counted per session."""
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._saving: set[str] = set()
        self._last_saves: dict[str, asyncio.Event] = {}
        """Ended sessions that this process is about to save; set when that is over."""
        self._warned: set[str] = set()
        self._warning_read: set[str] = set()
        """Sessions whose record was searched for the warning of another process."""
        core.observers.subscribe(self)

    def with_warning(self, session: Session) -> Session:
        """A new session, with a warning if its files will be on the node's disk alone."""
        if self._remote is None or self._remote.away is None:
            return session
        self._warned.add(session.id)
        return with_warnings(session, Warning(NOT_SAVED, BLOBS_UNAVAILABLE))

    # In the background

    def workspace_changed(self, session_id: str) -> None:
        """Files of the workspace may have changed."""
        self._changes[session_id] = self._changes.get(session_id, 0) + 1
        if self._remote is not None:
            self._schedule(session_id)

    def _schedule(self, session_id: str) -> None:
        if session_id not in self._due and session_id not in self._saving:
            delay = self._settings.delay.total_seconds()
            loop = asyncio.get_running_loop()
            self._due[session_id] = loop.call_later(delay, self._start, session_id)

    def _start(self, session_id: str) -> None:
        del self._due[session_id]
        self._saving.add(session_id)
        self._replica.background.start(self._save_in_background(session_id), f"save {session_id}")

    async def _save_in_background(self, session_id: str) -> None:
        backoff = Backoff()
        try:
            while True:
                connection = self._connections.reachable(session_id)
                if connection is None or session_id not in self._changes:
                    return  # It has ended, or its next instance has the files of the disk.
                if connection.session.workspace_mode is not WorkspaceMode.SYNC:
                    self._changes.pop(session_id)
                    return
                try:
                    await self._save(connection)
                    return
                except AtollError as error:
                    await self._warn(session_id, error.message)
                await backoff.pause()
        finally:
            self._saving.discard(session_id)
            if session_id in self._changes and self._connections.reachable(session_id) is not None:
                self._schedule(session_id)  # It changed during the save.

    async def before_result(self, connection: Connection) -> None:
        """Save a session with durability `execution`; a failure becomes a warning."""
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

    async def run(self, busy: Callable[[], Collection[str]]) -> None:
        """
        Save sessions in which something runs for long, which `busy` names, and withdraw warnings
        when the blob store answers again.
        """
        interval = self._settings.interval.total_seconds()
        since = 0.0
        while self._remote is not None:
            await asyncio.sleep(WARNING_SWEEP)
            since += WARNING_SWEEP
            try:
                if self._remote.away is None:
                    for session_id in list(self._warned):
                        if await self._is_saved(session_id):
                            await self._warn(session_id, None)
            except AtollError as error:
                log.info("autosave.postponed", error=error.message)
            if since >= interval:
                since = 0.0
                for session_id in busy():
                    self._changes.setdefault(session_id, 0)
                    self._schedule(session_id)

    async def _is_saved(self, session_id: str) -> bool:
        """Whether the last save has all changes, and is in the blob store."""
        unsaved = session_id in self._changes or session_id in self._saving
        return not unsaved and await self._checkpoints.is_synced(session_id)

    # On request

    async def save_now(self, session_id: str) -> Checkpoint | None:
        """Save a session's workspace; None if it is empty and always was."""
        connection = await self._starter.connect(session_id)
        if connection.session.workspace_mode is not WorkspaceMode.SYNC:
            raise Conflict(
                f"The workspace of session {session_id} is in the blob store already.",
                code="workspace_mounted",
            )
        return await self._save(connection)

    async def ensure_checkpoint(self, session_id: str) -> None:
        """Have a checkpoint of the session's current files, for another session to start from."""
        session = await self._records.get(session_id)
        if session.rested_at is not None and not session.status.ended:
            # Files of an archived session, and of one saved at its stop, have not changed since.
            if self._remote is None or not await self._was_saved_at_stop(session):
                await self._archiver.save_stopped(session_id)
        elif not session.status.ended:
            try:
                await self.save_now(session_id)
            except NodeUnreachable:
                # If its node cannot be reached either, the last checkpoint is used.
                await self._elsewhere.save(session)
        await self.wait_for_last_save(session_id)
        if await self._checkpoints.get(session_id) is None:
            raise CheckpointNotFound(f"Session {session_id} left no files.")

    async def _was_saved_at_stop(self, session: Session) -> bool:
        """A stop does not wait for a failing save."""
        if session.status is not SessionStatus.STOPPED or session.rested_at is None:
            return True
        last = await self._checkpoints.get(session.id)
        return last is not None and last.created_at >= session.rested_at

    async def _save(self, connection: Connection) -> Checkpoint | None:
        session_id = connection.session.id
        before = self._changes.get(session_id, 0)
        taken = await self._take(session_id, connection.link)
        if self._changes.get(session_id, 0) == before:
            self._changes.pop(session_id, None)
        if self._remote is not None:
            if session_id not in self._warning_read:
                # A process or node that is gone may have written the warning.
                self._warning_read.add(session_id)
                if any(warning.code == NOT_SAVED for warning in connection.session.warnings):
                    self._warned.add(session_id)
            # On the node's disk it is safe from a crash, and moves on from there when possible.
            home = await self._checkpoints.is_synced(session_id)
            await self._warn(session_id, None if home else BLOBS_UNAVAILABLE)
        return taken

    async def _take(self, session_id: str, link: Link) -> Checkpoint | None:
        before = self._changes.get(session_id, 0)
        try:
            async with asyncio.timeout(SAVE_TIMEOUT):
                return await self._checkpoints.take(
                    session_id, link, quiet=lambda: self._changes.get(session_id, 0) == before
                )
        except TimeoutError:
            raise TemporaryError(
                f"The workspace of session {session_id} was not saved within {SAVE_TIMEOUT:.0f} s.",
                code="save_timeout",
            ) from None

    # At the end of a session

    def session_ended(self, session: Session) -> None:
        # At once: a client that gets the answer may ask for the files.
        if self._records.is_here(session):
            self._last_saves.setdefault(session.id, asyncio.Event())

    async def save_last(self, session: Session) -> None:
        """Save what an ended session leaves, before its instance is removed."""
        try:
            await self._save_last(session)
        finally:
            self.session_cleared(session.id)

    def session_cleared(self, session_id: str) -> None:
        over = self._last_saves.pop(session_id, None)
        if over is not None:
            over.set()

    async def wait_for_last_save(self, session_id: str) -> None:
        """Until this process has saved an ended session, if it is going to."""
        over = self._last_saves.get(session_id)
        if over is not None:
            await over.wait()

    async def _save_last(self, session: Session) -> None:
        timer = self._due.pop(session.id, None)
        if timer is not None:
            timer.cancel()
        changed = self._changes.pop(session.id, None) is not None
        self._warned.discard(session.id)
        self._warning_read.discard(session.id)
        if self._embedded and self._remote is None:
            return  # The blobs are removed with the process.
        if not self._settings.keep:
            await self._checkpoints.forget(session.id)
            return
        # A server that ends all its sessions has little time, and its own disk keeps no copies.
        has_time = self._remote is not None or session.cause is not Cause.SHUTDOWN
        if has_time and session.workspace_mode is WorkspaceMode.SYNC:
            executions = self._store.executions
            if changed or (await executions.page(session_id=session.id, limit=1)).items:
                try:
                    await self._save_ended(session)
                except AtollError as error:
                    log.warning("workspace.not_saved", session_id=session.id, error=error.message)
        until = self._clock.now() + self._settings.keep
        mounted = session.workspace_mode is WorkspaceMode.MOUNT
        await self._checkpoints.keep_until(session.id, until, mounted=mounted)

    async def _save_ended(self, session: Session) -> None:
        instance = await self._instances.of(session)
        if instance is not None:
            try:
                if await self._instances.ensure_unpaused(instance):
                    await self._save_by(session.id, instance)
                    return
            except (InstanceNotObserved, LinkLost) as error:
                log.info("instance.lost", session_id=session.id, error=error.message)
        await self._archiver.save_stopped(session.id)

    async def _save_by(self, session_id: str, instance: Instance) -> None:
        link = await self._driver.connect(instance.handle)
        try:
            # The session is over: its code must not run on while a long save takes place.
            with contextlib.suppress(ExecutorError):  # The executor is older than this request.
                await link.call("quiet")
            await self._take(session_id, link)
        finally:
            link.close()

    # Warnings

    async def _warn(self, session_id: str, reason: str | None) -> None:
        """Add a warning to the session's record, or with None withdraw it."""
        if (reason is None) != (session_id in self._warned):
            return
        if reason is not None:
            log.warning("workspace.not_saved", session_id=session_id, error=reason)
        for _ in range(MAX_ATTEMPTS):
            session = await self._store.sessions.get(session_id)
            if session is None or session.status.ended:
                return
            if reason is None:
                changed = without_warnings(session, NOT_SAVED)
            else:
                changed = with_warnings(session, Warning(NOT_SAVED, reason))
            try:
                await self._records.save_silently(changed)
                break
            except VersionConflict:
                continue
        (self._warned.discard if reason is None else self._warned.add)(session_id)

    def close(self) -> None:
        for timer in self._due.values():
            timer.cancel()
