"""
Copies of sessions: a new one with the files that another has at this moment.

On the node of the other its workspace is copied, sharing what the file system can share; an
instance that runs stands still for as long as that takes. Where that cannot be, the new session
begins with a checkpoint of the other that is taken for it. Memory, processes, contexts and
executions are not copied.
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
from atoll.service.sessions.connections import instance_lease, workspace_lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.clock import Clock
    from atoll.coordination.leases import Leases
    from atoll.drivers.base import Driver
    from atoll.model.session import Session
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.lifecycle import Change, Lifecycle
    from atoll.service.sessions.secrets import Secrets
    from atoll.service.sessions.service import Sessions
    from atoll.stores.base import Store


AT_ONCE = 2
"""Workspaces that this process copies at the same time: each takes a thread for as long."""


class Clones:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        connections: Connections,
        sessions: Sessions,
        lifecycle: Lifecycle,
        autosave: Autosave,
        secrets: Secrets,
        leases: Leases,
        clock: Clock,
        node_id: str,
    ) -> None:
        self._store = store
        self._driver = driver
        self._connections = connections
        self._sessions = sessions
        self._lifecycle = lifecycle
        self._autosave = autosave
        self._secrets = secrets
        self._leases = leases
        self._clock = clock
        self._node_id = node_id
        self._copying = asyncio.Semaphore(AT_ONCE)

    async def clone(
        self, source_id: str, change: Change, *, session_id: str | None = None
    ) -> Session:
        """
        A new session that runs, as the other is but for the change; the one that is there already
        when its id is given and known.
        """
        if session_id is not None and (known := await self._store.sessions.get(session_id)):
            return await self._sessions.known(known)
        source = await self._connections.session(source_id)
        now = self._clock.now()
        cloned = dataclasses.replace(
            source,
            id=session_id or ids.session_id(),
            status=SessionStatus.CREATING,
            wanted=Wanted.RUNNING,
            runtime_type=self._driver.kind,
            runtime_node=self._node_id,
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
        cloned = await self._lifecycle.changed(cloned, change)
        if source.secrets:
            await self._secrets.ready(source)
            cloned = await self._secrets.seal(cloned, self._secrets.reveal(source))
        name = ids.instance_id()
        # However long that takes, it is not taken for left behind before it has an owner.
        async with self._leases.lease(workspace_lease(name), self._leases.new_owner()):
            return await self._begun(source, cloned, name)

    async def _begun(self, source: Session, cloned: Session, name: str) -> Session:
        """`name` is that of the new workspace, if there is to be one now."""
        workspace = None
        if cloned.resources.disk == source.resources.disk:
            workspace = await self._copied(source.id, name)
        if workspace is None and not await self._has_files(source.id):
            cloned = dataclasses.replace(cloned, started_from=None)
        try:
            return await self._sessions.begin(dataclasses.replace(cloned, workspace=workspace))
        except BaseException:
            # Else the sweep would find it, after a while.
            if workspace is not None and await self._store.sessions.get(cloned.id) is None:
                await self._driver.discard(workspace)
            raise

    async def _has_files(self, source_id: str) -> bool:
        """Whether there is a checkpoint to begin with; one is taken for it."""
        try:
            await self._autosave.fresh(source_id)
            return True
        except CheckpointNotFound:
            source = await self._connections.session(source_id)
            known = source.status in (SessionStatus.RUNNING, SessionStatus.ARCHIVED)
            if not known:
                raise
            return False  # All that it has would be there.

    async def _copied(self, source_id: str, name: str) -> str | None:
        """A copy of the session's workspace on this node; None when there cannot be one."""
        if "copy" not in self._driver.capabilities.features:
            return None
        # The place first: nobody stands still in line for one.
        async with (
            self._copying,
            self._leases.lease(instance_lease(source_id), self._leases.new_owner()),
        ):
            source = await self._connections.session(source_id)
            if (
                source.status.ended
                or source.runtime_node != self._node_id
                or source.workspace is None
                or source.workspace_mode is not WorkspaceMode.SYNC
            ):
                return None
            async with self._standing_still(source) as still:
                if still and await self._driver.copy(source.workspace, name):
                    return name
        return None

    @contextlib.asynccontextmanager
    async def _standing_still(self, source: Session) -> AsyncIterator[bool]:
        """Whether all that it wrote to its workspace is on the disk, and it writes no more."""
        instance = None
        if source.instance_id is not None:
            instance = await self._store.instances.get(source.instance_id)
        state = State.GONE
        if instance is not None:
            state = await self._connections.state(instance.handle)
        if instance is None or state is not State.RUNNING:
            yield state is not State.UNKNOWN  # One that is paused was told to write it all first.
            return
        if "pause" not in self._driver.capabilities.features:
            yield False
            return
        link = await self._driver.connect(instance.handle)
        try:
            await link.call("sync")
        except ExecutorError:
            yield False  # One of before does not know the word.
            return
        finally:
            link.close()
        try:
            # Within: cut off in the middle it may stand still all the same.
            await self._driver.pause(instance.handle)
            yield True
        finally:
            await self._driver.resume(instance.handle)
