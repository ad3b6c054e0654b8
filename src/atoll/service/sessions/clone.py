"""
Clones sessions: creates a session with the files that another has at this moment.

On the node of the source its workspace is copied, sharing what the file system can share; a running
instance is paused for as long as that takes. Where that is impossible, the clone starts from a
checkpoint that is taken of the source. Memory, processes, contexts and executions are not copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll import ids
from atoll.errors import CheckpointNotFound
from atoll.link.errors import ExecutorError
from atoll.model.instance import State
from atoll.model.session import SessionStatus, Wanted, WorkspaceMode
from atoll.service.sessions.records import instance_lease, workspace_lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.session import Session
    from atoll.service.sessions.checkpoint_requests import CheckpointRequests
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.create import SessionCreator
    from atoll.service.sessions.secrets import Secrets
    from atoll.service.sessions.update import SessionChange, SessionUpdater

MAX_COPIES = 2
"""Workspaces that this process copies at the same time: each copy occupies a thread."""


class Cloner:
    def __init__(
        self,
        core: SessionCore,
        creator: SessionCreator,
        updater: SessionUpdater,
        checkpoint_requests: CheckpointRequests,
        secrets: Secrets,
    ) -> None:
        self._replica = core.replica
        self._store = core.replica.store
        self._leases = core.replica.leases
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._creator = creator
        self._updater = updater
        self._checkpoint_requests = checkpoint_requests
        self._secrets = secrets
        self._copying = asyncio.Semaphore(MAX_COPIES)

    async def clone(
        self, source_id: str, change: SessionChange, *, session_id: str | None = None
    ) -> Session:
        """
        A new running session that equals the source but for the change; the existing one if
        `session_id` is known.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self._creator.existing(known)
        source = await self._records.get(source_id)
        now = self._replica.clock.now()
        clone = dataclasses.replace(
            source,
            id=session_id or ids.session_id(),
            status=SessionStatus.CREATING,
            wanted=Wanted.RUNNING,
            runtime_type=self._driver.kind,
            runtime_node=self._replica.node_id,
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(seconds=source.timeout),
            instance_id=None,
            workspace=None,
            ended_at=None,
            cause=None,
            message=None,
            started_from=source_id,
            warnings=(),
            active_at=now,
            rested_at=None,
            failures=0,
            retry_at=None,
            secrets={},
            version=1,
        )
        clone = await self._updater.changed(clone, change)
        if source.secrets:
            await self._secrets.prepare(source)
            clone = await self._secrets.seal(clone, self._secrets.reveal(source))
        workspace = ids.instance_id()
        # The orphan sweep skips workspaces whose lease is held.
        async with self._leases.lease(workspace_lease(workspace), self._leases.new_owner()):
            return await self._create(source, clone, workspace)

    async def _create(self, source: Session, clone: Session, workspace: str) -> Session:
        """`workspace` names the copy, if one can be made."""
        copied = clone.resources.disk == source.resources.disk and await self._copy_workspace(
            source.id, workspace
        )
        if copied:
            clone = dataclasses.replace(clone, workspace=workspace)
        elif not await self._has_files(source.id):
            clone = dataclasses.replace(clone, started_from=None)
        try:
            return await self._creator.create_cold(clone)
        except BaseException:
            # The orphan sweep would remove it too, some minutes later.
            if copied and await self._store.sessions.get(clone.id) is None:
                await self._driver.workspaces.discard(workspace)
            raise

    async def _has_files(self, source_id: str) -> bool:
        """Whether there is a checkpoint to start from; one is taken for it."""
        try:
            await self._checkpoint_requests.ensure(source_id)
            return True
        except CheckpointNotFound:
            source = await self._records.get(source_id)
            if source.status not in (SessionStatus.RUNNING, SessionStatus.ARCHIVED):
                raise
            return False  # The workspace is empty.

    async def _copy_workspace(self, source_id: str, name: str) -> bool:
        """Copy the source's workspace on this node; false if that is impossible."""
        if not self._driver.workspaces.can_copy:
            return False
        # The slot first: no session is paused while it waits for one.
        async with (
            self._copying,
            self._leases.lease(instance_lease(source_id), self._leases.new_owner()),
        ):
            source = await self._records.get(source_id)
            if (
                source.status.ended
                or not self._records.is_here(source)
                or source.workspace is None
                or source.workspace_mode is not WorkspaceMode.SYNC
            ):
                return False
            async with self._paused(source) as paused:
                return paused and await self._driver.workspaces.copy(source.workspace, name)

    @contextlib.asynccontextmanager
    async def _paused(self, source: Session) -> AsyncIterator[bool]:
        """Whether all that the session wrote is on the disk, and it writes no more."""
        instance = await self._instances.of(source)
        state = State.GONE
        if instance is not None:
            state = await self._instances.state(instance.handle)
        if instance is None or state is not State.RUNNING:
            yield True  # A paused instance has written everything before its pause.
            return
        if self._driver.pausing is None:
            yield False
            return
        link = await self._driver.connect(instance.handle)
        try:
            await link.call("sync")
        except ExecutorError:
            yield False  # The executor is older than this request.
            return
        finally:
            link.close()
        try:
            # Inside: a pause that is cancelled may have been done all the same.
            await self._driver.pausing.pause(instance.handle)
            yield True
        finally:
            await self._driver.pausing.resume(instance.handle)
