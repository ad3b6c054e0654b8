"""
Stops the instances of sessions: cancels what runs, takes a checkpoint, ends the instance.

A failing checkpoint does not keep a session from being stopped if its files stay on the node's disk
until the session is archived. The session shows a warning until then. Where the files end with the
instance, the stop waits for a checkpoint that is in the blob store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, TemporaryError
from atoll.link.errors import ExecutorError
from atoll.model.session import Session, SessionStatus, Warning, WorkspaceMode
from atoll.model.session_changes import NOT_SAVED, with_status, with_warnings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link
    from atoll.model.instance import Instance
    from atoll.service.sessions.core import SessionCore
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

MAX_WAIT_FOR_CHECKPOINT = timedelta(minutes=30)
"""
How long a stop waits for a checkpoint without which files are lost: user code could otherwise keep
its session from being stopped.
"""


class InstanceStopper:
    def __init__(
        self,
        core: SessionCore,
        settings: Settings,
    ) -> None:
        self._clock = core.replica.clock
        self._driver = core.driver
        self._records = core.records
        self._instances = core.instances
        self._observers = core.observers
        self._checkpoints = core.checkpoints
        self._grace = settings.session.stop_grace
        self._checkpoint_timeout = settings.archive.timeout
        self._checkpoints_at_stop = settings.blob.url is not None
        """On the node's own disk a checkpoint beside the workspace protects from nothing."""

    async def stop(self, session: Session) -> Session:
        """Stop the session's instance, or finish a stop that was interrupted."""
        if session.status is not SessionStatus.STOPPING:
            session = await self._records.save(
                with_status(session, SessionStatus.STOPPING, self._clock.now())
            )
        self._observers.session_stopping(session)
        instance = await self._instances.of(session)
        if instance is not None:
            failure = await self._end(session, instance)
            if failure is not None:
                session = with_warnings(session, Warning(NOT_SAVED, failure))
        stopped = with_status(session, SessionStatus.STOPPED, self._clock.now())
        workspace = session.workspace if self._driver.workspaces.outlive_instances else None
        return await self._records.save(
            dataclasses.replace(stopped, instance_id=None, workspace=workspace)
        )

    async def _end(self, session: Session, instance: Instance) -> str | None:
        """Take a checkpoint and end the instance. Returns why there is no checkpoint, or None."""
        failure = None
        runs = await self._instances.ensure_unpaused(instance)
        if session.workspace_mode is WorkspaceMode.MOUNT:
            pass  # Its files are in the bucket.
        elif not self._driver.workspaces.outlive_instances:
            failure = await self._secure_or_give_up(session, instance, runs=runs)
        elif runs and self._checkpoints_at_stop:
            failure = await self._checkpoint(session, instance)
        await self._driver.stop(instance.handle, grace=self._grace)
        await self._instances.remove(instance.id)
        return failure

    async def _secure_or_give_up(
        self, session: Session, instance: Instance, *, runs: bool
    ) -> str | None:
        """
        Why the latest files are lost, or None. Raises while it may still be possible to save them.
        """
        if not runs:
            return "The instance ended before the stop; the files are those of the last checkpoint."
        try:
            await self._secure(session, instance)
        except AtollError as error:
            since = session.rested_at or session.updated_at
            if self._clock.now() - since < MAX_WAIT_FOR_CHECKPOINT:
                raise
            log.warning("workspace.not_saved", session_id=session.id, error=error.message)
            return f"The files are those of the last checkpoint. {error.message}"
        return None

    async def _secure(self, session: Session, instance: Instance) -> None:
        """Take a checkpoint that is in the blob store; the instance has the only other copy."""
        try:
            async with (
                asyncio.timeout(self._checkpoint_timeout.total_seconds()),
                self.quiesced(instance) as link,
            ):
                await self._checkpoints.secure(session.id, link)
        except TimeoutError:
            raise TemporaryError(
                f"The checkpoint of session {session.id} took longer than "
                f"{self._checkpoint_timeout}.",
                code="save_timeout",
            ) from None

    async def _checkpoint(self, session: Session, instance: Instance) -> str | None:
        try:
            async with (
                asyncio.timeout(self._checkpoint_timeout.total_seconds()),
                self.quiesced(instance) as link,
            ):
                await self._checkpoints.take(session.id, link, empty=True)
        except (AtollError, TimeoutError) as error:
            failure = str(error) or f"The checkpoint took longer than {self._checkpoint_timeout}."
            log.warning("workspace.not_saved", session_id=session.id, error=failure)
            return failure
        return None

    @contextlib.asynccontextmanager
    async def quiesced(self, instance: Instance) -> AsyncIterator[Link]:
        """A link to the executor after all user code was cancelled, and then killed."""
        link = await self._driver.connect(instance.handle)
        try:
            await self._cancel_executions(link)
            with contextlib.suppress(ExecutorError):  # The executor is older than this request.
                await link.call("quiet")
            yield link
        finally:
            link.close()

    async def _cancel_executions(self, link: Link) -> None:
        running = [run["id"] for run in link.hello["runs"] if not run["ended"]]
        grace = self._grace.total_seconds()
        with contextlib.suppress(TimeoutError, ExecutorError):
            async with asyncio.timeout(grace):
                for execution_id in running:
                    await link.call("cancel", id=execution_id, grace=grace)
                for execution_id in running:
                    await link.attach(execution_id, 0, None)
