"""
Takes checkpoints of sessions without an instance, and archives sessions.

Only an executor reads and writes workspaces, so an instance is made for the checkpoint and removed
after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, PermanentError
from atoll.link.errors import ExecutorError
from atoll.model.session import Cause, Session, SessionStatus, WorkspaceMode
from atoll.model.session_changes import NOT_SAVED, with_status, without_warnings
from atoll.service.sessions.records import instance_lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.instance import Instance
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.stop import InstanceStopper
    from atoll.settings import ArchiveSettings

log = structlog.get_logger(__name__)

SLOT_PAUSE = timedelta(seconds=5)
"""Pause before a session is archived that found all of the node's archive slots taken."""


class NoArchiveSlot(Exception):
    """As many sessions of the node are being archived as `archive.concurrency` allows."""


class Archiver:
    def __init__(
        self,
        core: SessionCore,
        stopper: InstanceStopper,
        settings: ArchiveSettings,
    ) -> None:
        self._replica = core.replica
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._stopper = stopper
        self._checkpoints = core.checkpoints
        self._settings = settings

    async def archive(self, session: Session) -> Session:
        """Move the files of a stopped session to the blob store. Raises `NoArchiveSlot`."""
        now = self._replica.clock.now
        async with self._slot():
            if session.status is not SessionStatus.ARCHIVING:
                session = await self._records.save(
                    with_status(session, SessionStatus.ARCHIVING, now())
                )
            limit = self._settings.timeout
            try:
                async with asyncio.timeout(limit.total_seconds()):
                    await self._checkpoint(session)
            except TimeoutError:
                raise PermanentError(
                    f"Session {session.id} was not archived within {limit.total_seconds():g} s.",
                    code="archive_timeout",
                    cause=Cause.TIMEOUT,
                ) from None
            workspace = session.workspace
            archived = with_status(session, SessionStatus.ARCHIVED, now())
            archived = dataclasses.replace(archived, workspace=None)
            session = await self._records.save(without_warnings(archived, NOT_SAVED))
        if workspace is not None:
            try:
                await self._driver.workspaces.discard(workspace)
            except AtollError as error:
                # The workspace has no owner now, so the orphan sweep removes it.
                log.warning("workspace.not_discarded", workspace=workspace, error=error.message)
        return session

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        leases = self._replica.leases
        for number in range(self._settings.concurrency):
            key = f"archive:{self._replica.node_id}#{number}"
            lease = await leases.try_lease(key, leases.new_owner())
            if lease is not None:
                async with lease:
                    yield
                return
        raise NoArchiveSlot

    async def checkpoint_stopped(self, session_id: str) -> None:
        """Take a checkpoint of a session of this node that is stopped, or ended while it was."""
        session = await self._records.get(session_id)
        if session.status.ended:
            await self._checkpoint(session)  # The caller removes the session and holds its lease.
            return
        leases = self._replica.leases
        async with leases.lease(instance_lease(session_id), leases.new_owner()):
            session = await self._records.get(session_id)
            if session.status is SessionStatus.STOPPED:
                await self._checkpoint(session)

    async def secure(self, session: Session, instance: Instance | None) -> None:
        """Take a checkpoint of the session and verify it; user code in its instance is killed."""
        if instance is None or not await self._instances.ensure_unpaused(instance):
            await self._checkpoint(session)
        elif session.workspace_mode is WorkspaceMode.SYNC:
            async with self._stopper.quiesced(instance) as link:
                await self._checkpoints.secure(session.id, link)

    async def _checkpoint(self, session: Session) -> None:
        kept = session.workspace is not None and self._driver.workspaces.outlive_instances
        has_files = self._records.is_here(session) and kept
        if not has_files or session.workspace_mode is not WorkspaceMode.SYNC:
            return
        ready = await self._instances.make(session)
        try:
            with contextlib.suppress(ExecutorError):  # The executor is older than this request.
                await ready.link.call("quiet")
            await self._checkpoints.secure(session.id, ready.link)
        finally:
            await asyncio.shield(self._instances.discard(ready, with_workspace=False))
