"""
Continues sessions whose instances the node ends, such as pods that a cluster evicts.

While the instance still runs, its user code is killed and a last checkpoint is taken; what was
running is retried on the next instance. The session keeps its id and its files. Every replica is
notified, and the lease of the session's instance lets one of them act at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, VersionConflict
from atoll.link.errors import ExecutorError
from atoll.model.instance import State
from atoll.model.session import SessionStatus, Wanted, Warning, WorkspaceMode
from atoll.model.session_changes import REPLACED, with_warnings, without_instance
from atoll.service.sessions.records import instance_lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.model.instance import Instance, Observation
    from atoll.model.session import Session
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.start import SessionStarter

CHECKPOINT_TIMEOUT = 600.0
"""Seconds of one attempt; the node ends the instance earlier if its notice is shorter."""
RETRY_DELAY = 0.5
"""Seconds before another attempt."""

log = structlog.get_logger(__name__)


class SessionDisruptions:
    def __init__(self, core: SessionCore, starter: SessionStarter) -> None:
        self._replica = core.replica
        self._driver = core.driver
        self._records = core.records
        self._connections = core.connections
        self._checkpoints = core.checkpoints
        self._starter = starter

    async def replace_instance(self, instance: Instance) -> bool:
        """
        Have the session of an instance that ends continue on another one. False if the instance
        still runs, and its session cannot leave it yet: call again.
        """
        if instance.session_id is None:
            return not await self._still_runs(instance)  # A session may just be getting it.
        leases = self._replica.leases
        async with leases.lease(instance_lease(instance.session_id), leases.new_owner()):
            session = await self._records.get(instance.session_id)
            if session.status.ended:
                return True
            if session.instance_id != instance.id or not _goes_on(session):
                return not await self._still_runs(instance)
            if not await self._leave(session, instance):
                return True
        # In the background, without the lease: in a drain it may take long to find room.
        starting = self._starter.connect(session.id)
        self._replica.background.start(starting, f"start {session.id}")
        return True

    async def _still_runs(self, instance: Instance) -> bool:
        observed = await self._driver.observe(instance.handle)
        return observed.state is State.RUNNING and observed.cause is not None

    async def _leave(self, session: Session, instance: Instance) -> bool:
        """Save the session's files and remove its instance; false if the session has changed."""
        observed = await self._driver.observe(instance.handle)
        # First: whatever needs the session from now on waits for this lease, and does not connect
        # to the instance that ends.
        if not await self._change(session, _leaving):
            return False
        saved = await self._save(session, instance)
        warning = Warning(REPLACED, _reason(observed))
        if not await self._change(session, lambda now: _without(now, warning, saved=saved)):
            return False
        self._connections.disconnect(session.id)
        log.info(
            "session.instance_replaced",
            session_id=session.id,
            instance_id=instance.id,
            cause=observed.cause,
            saved=saved,
        )
        await self._driver.destroy(instance.handle)
        await self._replica.store.instances.remove(instance.id)
        return True

    async def _save(self, session: Session, instance: Instance) -> bool:
        """
        Take a checkpoint, in as many attempts as it takes while the instance runs. False if there
        is none, or none is needed.
        """
        if self._driver.workspaces.outlive_instances:
            return False
        if session.workspace_mode is not WorkspaceMode.SYNC:
            return True
        while (await self._driver.observe(instance.handle)).state is State.RUNNING:
            if await self._checkpoint(session, instance):
                return True
            await asyncio.sleep(RETRY_DELAY)
        return False

    async def _change(self, session: Session, apply: Callable[[Session], Session]) -> bool:
        """Change the record; false if the session does not go on, or has another instance."""
        while True:
            current = await self._records.get(session.id)
            if current.instance_id != session.instance_id or not _goes_on(current):
                return False
            changed = apply(current)
            try:
                await self._records.save(
                    dataclasses.replace(changed, updated_at=self._replica.clock.now())
                )
            except VersionConflict:
                continue
            return True

    async def _checkpoint(self, session: Session, instance: Instance) -> bool:
        """Whether the checkpoint has everything; what was running is retried elsewhere."""
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT):
                link = await self._driver.connect(instance.handle)
                try:
                    with contextlib.suppress(ExecutorError):  # It is older than this request.
                        await link.call("quiet")
                    await self._checkpoints.take(session.id, link, empty=True)
                finally:
                    link.close()
        except (AtollError, TimeoutError) as error:
            log.warning("workspace.not_saved", session_id=session.id, error=str(error))
            return False
        return True


def _goes_on(session: Session) -> bool:
    # `starting` is what an interrupted replacement leaves.
    running = session.status in (SessionStatus.RUNNING, SessionStatus.STARTING)
    return session.wanted is Wanted.RUNNING and running


def _leaving(session: Session) -> Session:
    """The session while its instance is about to end."""
    return dataclasses.replace(session, status=SessionStatus.STARTING)


def _without(session: Session, warning: Warning, *, saved: bool) -> Session:
    """The session after the loss of its instance, and of its workspace if a checkpoint has it."""
    lost = with_warnings(without_instance(session, session.updated_at), warning)
    return dataclasses.replace(lost, workspace=None) if saved else lost


def _reason(observed: Observation) -> str:
    return observed.message or "The node ended the session's instance."
