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

CHECKPOINT_TIMEOUT = 60.0
"""Seconds; the node ends the instance earlier if its notice is shorter."""

log = structlog.get_logger(__name__)


class SessionDisruptions:
    def __init__(self, core: SessionCore, starter: SessionStarter) -> None:
        self._replica = core.replica
        self._driver = core.driver
        self._records = core.records
        self._connections = core.connections
        self._checkpoints = core.checkpoints
        self._starter = starter

    async def replace_instance(self, instance: Instance) -> None:
        """Have the session of an instance that ends continue on another one."""
        session_id = instance.session_id
        if session_id is None:
            return
        leases = self._replica.leases
        async with leases.lease(instance_lease(session_id), leases.new_owner()):
            session = await self._records.get(session_id)
            if session.instance_id != instance.id or not _goes_on(session):
                return  # Another replica was faster, or the session ends anyway.
            observed = await self._driver.observe(instance.handle)
            # First: whatever needs the session from now on waits for this lease, and does not
            # connect to the instance that ends.
            if not await self._change(session, _leaving):
                return
            saved = observed.state is State.RUNNING and await self._checkpoint(session, instance)
            warning = Warning(REPLACED, _reason(observed))
            if not await self._change(session, lambda now: _without(now, warning, saved=saved)):
                return
            self._connections.disconnect(session_id)
            log.info(
                "session.instance_replaced",
                session_id=session_id,
                instance_id=instance.id,
                cause=observed.cause,
                saved=saved,
            )
            await self._driver.destroy(instance.handle)
            await self._replica.store.instances.remove(instance.id)
            await self._starter.start(session_id)

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
        if session.workspace_mode is not WorkspaceMode.SYNC:
            return True
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
