"""
Decides when checkpoints of sessions are taken.

With a remote blob store: shortly after an execution has ended or a file was written, regularly
while code runs for long, and when the session ends. If blobs are on the node's own disk, a copy
next to the workspace protects from nothing: then a checkpoint is taken on request
(`checkpoint_requests.py`), and at the end of a session whose files may still be requested.

A session with durability `execution` gets one before each result is committed. A failed checkpoint
does not fail the execution: the session has a warning until one succeeds. If the files were lost
with the instance, so was the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import structlog

from atoll.errors import (
    AtollError,
    InstanceNotObserved,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.instance import State
from atoll.model.session import (
    Cause,
    Durability,
    Session,
    SessionStatus,
    Wanted,
    Warning,
    WorkspaceMode,
)
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
    from atoll.settings import WorkspaceSettings

log = structlog.get_logger(__name__)

BLOBS_UNAVAILABLE = (
    "The blob store does not answer: the files are on the disk of their node alone until it does."
)
CHECKPOINT_TIMEOUT = 7200.0
"""Seconds that one checkpoint may take."""
WARNING_SWEEP = 5.0
"""Seconds between two checks for warnings that no longer apply."""
MAX_WAIT_FOR_INSTANCE = timedelta(minutes=5)
"""For the unreachable instance of an ended session, which has the only copy of its files."""
MAX_ATTEMPTS = 5
"""Attempts to write a warning to a session that others write at the same time."""


class UnreachableWorkspace(TemporaryError):
    """The last checkpoint of an ended session cannot be taken yet."""


class BlobAvailability(Protocol):
    """A remote blob store that may be unavailable."""

    @property
    def away(self) -> str | None:
        """Why the store does not answer; None while it does."""


class Autosave(SessionObserver):
    def __init__(
        self,
        core: SessionCore,
        archiver: Archiver,
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
        self._archiver = archiver
        self._checkpoints = core.checkpoints
        self._settings = settings
        self._remote = remote
        self._embedded = embedded
        self._changes: dict[str, int] = {}
        """Changes of workspaces since their last checkpoint, counted per session."""
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._under_way: set[str] = set()
        self._last_checkpoints: dict[str, asyncio.Event] = {}
        """Ended sessions that this process takes a last checkpoint of; set when that is over."""
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
        if session_id not in self._due and session_id not in self._under_way:
            delay = self._settings.delay.total_seconds()
            loop = asyncio.get_running_loop()
            self._due[session_id] = loop.call_later(delay, self._start, session_id)

    def _start(self, session_id: str) -> None:
        del self._due[session_id]
        self._under_way.add(session_id)
        self._replica.background.start(
            self._checkpoint_in_background(session_id), f"checkpoint {session_id}"
        )

    async def _checkpoint_in_background(self, session_id: str) -> None:
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
                    await self.checkpoint(connection)
                    return
                except AtollError as error:
                    await self._warn(session_id, error.message)
                await backoff.pause()
        finally:
            self._under_way.discard(session_id)
            if session_id in self._changes and self._connections.reachable(session_id) is not None:
                self._schedule(session_id)  # It changed meanwhile.

    async def before_result(self, session_id: str, instance_id: str | None) -> bool:
        """
        With durability `execution`, take a checkpoint of what has run in an instance; a failure
        becomes a warning. False if the files have certainly been lost with the instance.
        """
        connection = self._connections.reachable(session_id)
        if connection is None:
            return not await self._has_lost_files(session_id, instance_id)
        self.workspace_changed(session_id)
        session = connection.session
        if session.durability is not Durability.EXECUTION or (
            session.workspace_mode is not WorkspaceMode.SYNC
        ):
            return True
        try:
            await self.checkpoint(connection)
        except AtollError as error:
            if await self._has_lost_files(session_id, instance_id):
                return False
            await self._warn_of(error, session_id)
        return True

    async def _has_lost_files(self, session_id: str, instance_id: str | None) -> bool:
        """
        Whether files that had to be kept have ended with an instance that failed. An instance that
        is stopped or evicted, or was replaced already, has been saved by others.
        """
        if self._driver.workspaces.outlive_instances or instance_id is None:
            return False
        try:
            session = await self._records.get(session_id)
            instance = await self._store.instances.get(instance_id)
            if instance is None or not _needs_files_of(session, instance_id):
                return False
            observed = await self._driver.observe(instance.handle)
        except AtollError as error:
            # The result is known, and must not wait for this.
            log.info("instance.not_observed", instance_id=instance_id, error=error.message)
            return False
        ended = observed.state in (State.EXITED, State.GONE)
        return ended and observed.cause is not Cause.EVICTED

    async def _warn_of(self, error: AtollError, session_id: str) -> None:
        try:
            await self._warn(session_id, error.message)
        except TemporaryError as unwritten:
            # The result must not be lost for a warning.
            log.warning(
                "autosave.warning_not_stored",
                session_id=session_id,
                warning=error.message,
                error=unwritten.message,
            )

    async def run(self, busy: Callable[[], Collection[str]]) -> None:
        """
        Have checkpoints taken of sessions in which something runs for long, which `busy` names,
        and withdraw warnings when the blob store answers again.
        """
        interval = self._settings.interval.total_seconds()
        since = 0.0
        while self._remote is not None:
            await asyncio.sleep(WARNING_SWEEP)
            since += WARNING_SWEEP
            try:
                if self._remote.away is None:
                    for session_id in list(self._warned):
                        if await self._is_complete(session_id):
                            await self._warn(session_id, None)
            except AtollError as error:
                log.info("autosave.postponed", error=error.message)
            if since >= interval:
                since = 0.0
                for session_id in busy():
                    self._changes.setdefault(session_id, 0)
                    self._schedule(session_id)

    # One checkpoint

    async def checkpoint(self, connection: Connection) -> Checkpoint | None:
        """
        Take a checkpoint of a running session, and withdraw its warning if the checkpoint reached
        the blob store. None if the workspace is empty and always was.
        """
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
            # On the node's disk it survives a crash, and is uploaded from there later.
            home = await self._checkpoints.is_synced(session_id)
            await self._warn(session_id, None if home else BLOBS_UNAVAILABLE)
        return taken

    async def _take(self, session_id: str, link: Link) -> Checkpoint | None:
        before = self._changes.get(session_id, 0)
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT):
                return await self._checkpoints.take(
                    session_id, link, quiet=lambda: self._changes.get(session_id, 0) == before
                )
        except TimeoutError:
            raise TemporaryError(
                f"The workspace of session {session_id} was not saved within "
                f"{CHECKPOINT_TIMEOUT:.0f} s.",
                code="save_timeout",
            ) from None

    async def _is_complete(self, session_id: str) -> bool:
        """Whether the last checkpoint has all changes, and is in the blob store."""
        incomplete = session_id in self._changes or session_id in self._under_way
        return not incomplete and await self._checkpoints.is_synced(session_id)

    # At the end of a session

    def session_ended(self, session: Session) -> None:
        # At once: a client that gets the answer may ask for the files.
        if self._records.is_here(session):
            self._last_checkpoints.setdefault(session.id, asyncio.Event())

    async def take_last_checkpoint(self, session: Session) -> None:
        """Take a checkpoint of what an ended session leaves, before its instance is removed."""
        try:
            await self._take_last(session)
        finally:
            self.session_cleared(session.id)

    def session_cleared(self, session_id: str) -> None:
        over = self._last_checkpoints.pop(session_id, None)
        if over is not None:
            over.set()

    async def wait_for_last_checkpoint(self, session_id: str) -> None:
        """Wait for the last checkpoint of an ended session, if this process takes one."""
        over = self._last_checkpoints.get(session_id)
        if over is not None:
            await over.wait()

    async def _take_last(self, session: Session) -> None:
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
                    await self._checkpoint_ended(session)
                except UnreachableWorkspace:
                    raise  # The step is repeated.
                except AtollError as error:
                    log.warning("workspace.not_saved", session_id=session.id, error=error.message)
        until = self._clock.now() + self._settings.keep
        mounted = session.workspace_mode is WorkspaceMode.MOUNT
        await self._checkpoints.keep_until(session.id, until, mounted=mounted)

    async def _checkpoint_ended(self, session: Session) -> None:
        instance = await self._instances.of(session)
        if instance is not None:
            try:
                if await self._instances.ensure_unpaused(instance):
                    await self._checkpoint_instance(session.id, instance)
                    return
            except (InstanceNotObserved, LinkLost) as error:
                if self._may_be_alive(session):
                    raise UnreachableWorkspace(
                        f"The instance of session {session.id} cannot be reached, and has the only "
                        f"copy of its latest files: {error.message}"
                    ) from error
                log.info("instance.lost", session_id=session.id, error=error.message)
        await self._archiver.checkpoint_stopped(session.id)

    def _may_be_alive(self, session: Session) -> bool:
        """Whether an ended session's instance is worth waiting for; its files end with it."""
        since = session.ended_at or session.updated_at
        waited = self._clock.now() - since
        return not self._driver.workspaces.outlive_instances and waited < MAX_WAIT_FOR_INSTANCE

    async def _checkpoint_instance(self, session_id: str, instance: Instance) -> None:
        link = await self._driver.connect(instance.handle)
        try:
            # The session has ended: its code must not continue during a long checkpoint.
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


def _needs_files_of(session: Session, instance_id: str) -> bool:
    return (
        session.durability is Durability.EXECUTION
        and session.workspace_mode is WorkspaceMode.SYNC
        and session.instance_id == instance_id
        and session.status is SessionStatus.RUNNING
        and session.wanted is Wanted.RUNNING
    )
