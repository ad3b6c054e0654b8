"""
Instances of sessions: makes, inspects and removes them.

An instance gets the session's workspace if this node has it. Otherwise it is filled from the
session's last checkpoint, or from the checkpoint of the session that it starts from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING

import structlog

from atoll.errors import InstanceNotObserved, PermanentError, WorkspaceLost
from atoll.model.instance import Observation, State
from atoll.model.session import SessionStatus, Warning
from atoll.service.instances import remove_instance
from atoll.service.sessions.pausing_and_resizing import resume_instance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Handle, Instance
    from atoll.model.session import Session
    from atoll.model.volume import Volume, VolumeMount
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.instances import InstanceMaker, ReadyInstance
    from atoll.service.replica import Replica
    from atoll.service.templates.service import Templates

log = structlog.get_logger(__name__)

PROBE_TIMEOUT = 2.0
"""Seconds that the probe of an instance may take."""


class SessionInstances:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        maker: InstanceMaker,
        templates: Templates,
        checkpoints: Checkpoints,
    ) -> None:
        self._store = replica.store
        self._background = replica.background
        self._driver = driver
        self._maker = maker
        self._templates = templates
        self._checkpoints = checkpoints

    async def of(self, session: Session) -> Instance | None:
        if session.instance_id is None:
            return None
        return await self._store.instances.get(session.instance_id)

    async def state(self, handle: Handle) -> State:
        """The instance's state; `InstanceNotObserved` if the driver cannot determine it in time."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                state = (await self._driver.observe(handle)).state
        except TimeoutError:
            state = State.UNKNOWN
        if state is State.UNKNOWN:
            # Not to be taken for dead: two instances would share one workspace.
            raise InstanceNotObserved(
                f"Cannot determine the state of instance {handle.instance_id}. Retry in a few "
                "seconds."
            )
        return state

    async def end_of(self, session: Session) -> Observation:
        """How the session's instance ended, as far as its node reports that."""
        instance = await self.of(session)
        if instance is None:
            return Observation(State.GONE)
        return await self._driver.observe(instance.handle)

    async def ensure_unpaused(self, instance: Instance) -> bool:
        """Resume the instance if it is paused; false if it has exited."""
        state = await self.state(instance.handle)
        if state is State.PAUSED:
            await resume_instance(self._driver, instance.handle)
        return state in (State.RUNNING, State.PAUSED)

    async def remove(self, instance_id: str) -> None:
        """Remove an instance, and keep its workspace."""
        instance = await self._store.instances.get(instance_id)
        if instance is not None:
            await remove_instance(self._store, self._driver, instance.handle)

    async def discard(self, ready: ReadyInstance, *, with_workspace: bool) -> None:
        """Remove an instance that was made for a session and is not recorded as the session's."""
        ready.link.close()
        await remove_instance(
            self._store, self._driver, ready.instance.handle, with_workspace=with_workspace
        )

    async def make(self, session: Session) -> ReadyInstance:
        """
        Make an instance for the session, connected and with its files. The caller holds the lease
        of the session's instance.
        """
        template = await self._templates.numbered(session.template_id, session.template_version)
        prefix = session.mount_prefix
        make = functools.partial(
            self._maker.make,
            template,
            session.resources,
            session_id=session.id,
            volumes=await self._volumes(session),
            prefix=prefix,
            on_delay=functools.partial(self._explain, session),
        )
        source, workspace = None, session.workspace
        if workspace is not None:
            await self._free(workspace)
        if not self._driver.workspaces.outlive_instances:
            workspace = None
        if workspace is None and prefix is None:
            source = await self._source(session)
        try:
            ready = await make(workspace=workspace)
        except WorkspaceLost:
            if prefix is not None:
                # The files are in the bucket; only this node's record of the mount is gone.
                return await make(workspace=None)
            if await self._checkpoints.get(session.id) is None:
                raise
            source = session.id
            ready = await make(workspace=None)
        return ready if source is None else await self._filled(source, ready, make)

    def _explain(self, session: Session, reason: str) -> None:
        """Show with the session why its instance does not start yet."""
        log.info("instance.delayed", session_id=session.id, reason=reason)
        self._background.start(
            self._store.sessions.explain(session, reason), f"explain the delay of {session.id}"
        )

    async def _filled(
        self, source: str, ready: ReadyInstance, make: Callable[..., Awaitable[ReadyInstance]]
    ) -> ReadyInstance:
        """An instance with the files of session `source`: this one, or a new one if it broke."""

        async def replace() -> Link:
            nonlocal ready
            await asyncio.shield(self.discard(ready, with_workspace=True))
            ready = await make(workspace=None)
            return ready.link

        try:
            restored = await self._checkpoints.restore(source, ready.link, replace)
        except BaseException:
            await asyncio.shield(self.discard(ready, with_workspace=True))
            raise
        if not restored.older:
            return ready
        backup = restored.backup
        message = (
            "The last checkpoint of the workspace is missing or damaged in the blob store; the "
            f"files are those of checkpoint {backup.number}, of "
            f"{backup.created_at:%Y-%m-%d %H:%M:%S} UTC."
        )
        return dataclasses.replace(ready, warnings=(Warning("older_backup", message),))

    async def _free(self, workspace: str) -> None:
        """Remove instances that a crashed process left with the workspace."""
        for handle in await self._driver.handles():
            if self._driver.workspaces.of(handle) == workspace:
                log.warning("instance.left_behind", instance_id=handle.instance_id)
                await remove_instance(self._store, self._driver, handle)

    async def _source(self, session: Session) -> str | None:
        """The session whose checkpoint fills the workspace of one that has no files here."""
        if session.status is SessionStatus.CREATING:
            return session.started_from
        if await self._checkpoints.get(session.id) is not None:
            return session.id
        # A session that was lost with its node before its first checkpoint starts over.
        source = session.started_from
        if source is None or await self._checkpoints.get(source) is None:
            return None
        return source

    async def _volumes(self, session: Session) -> tuple[tuple[Volume, VolumeMount], ...]:
        found = []
        for mount in session.volumes:
            volume = await self._store.volumes.get(mount.volume_id)
            if volume is None:
                raise PermanentError(
                    f"Volume {mount.volume_id} does not exist any more.", code="volume_not_found"
                )
            found.append((volume, mount))
        return tuple(found)
