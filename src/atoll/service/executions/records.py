"""
Records of executions: reads and writes them for as long as the database takes to answer, and waits
for executions that another replica owns.

Code keeps running while the database is unavailable, so the replica that owns it does not give up.
The end of an execution is announced to all replicas; a replica that waits for one also reads the
record every 5 s, because a notification can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import CoordinationUnavailable, NotFound, TemporaryError, VersionConflict
from atoll.model.event import execution_event
from atoll.model.execution import ExecutionStatus
from atoll.model.outcome import without_result
from atoll.model.session import Cause
from atoll.service.backoff import Backoff

if TYPE_CHECKING:
    from atoll.coordination.base import Subscription
    from atoll.model.event import Event
    from atoll.model.execution import Execution, Request
    from atoll.service.executions.offload import Offload
    from atoll.service.replica import Replica

log = structlog.get_logger(__name__)

READ_INTERVAL = 5.0
"""Seconds between two reads of a record while notifications work."""
UNNOTIFIED_READ_INTERVAL = 1.0
"""The same while coordination is unavailable."""
MAX_WAIT = 60.0
"""Seconds of one wait for an execution; a longer one is repeated."""


RELEASED = "leaving"
"""Topic: executions have no owner, because a replica shuts down or has released them."""


class OwnedElsewhere(Exception):
    """Another replica owns the execution now."""


class ExecutionRecords:
    def __init__(self, replica: Replica, offload: Offload) -> None:
        self._replica = replica
        self._store = replica.store.executions
        self._coordination = replica.coordination
        self._clock = replica.clock
        self._offload = offload

    # New executions

    async def add(self, execution: Execution, *, after: Execution | None = None) -> Execution:
        """
        Store a new execution: the first of its two commits. `after` is the execution of the same
        invocation that it follows.
        """
        row = await self._offload.store(execution)
        event = execution_event(execution, "submitted", execution.created_at)
        if after is None:
            await self._store.add(row, event=event)
        else:
            await self._store.add_after(row, after, event=event)
        return execution if row is execution else dataclasses.replace(execution, kept=row.kept)

    # Reads

    async def get(self, execution_id: str) -> Execution | None:
        """Read the record; wait as long as the database is unavailable."""
        backoff = Backoff()
        while True:
            try:
                return await self._store.get(execution_id)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution_id, error=error.message)
                await backoff.pause()

    async def owned(self, execution_id: str) -> Execution | None:
        """The record, if this replica owns it and it has not ended."""
        found = await self.get(execution_id)
        if found is None or found.status.ended or found.holder != self._replica.id:
            return None
        return found

    async def complete(self, execution: Execution) -> Execution:
        """The execution with the parts of it that are too large for its record."""
        return await self._offload.fetch(execution)

    async def request_of(self, execution: Execution) -> Request:
        """The request as it was submitted."""
        return await self._offload.request_of(execution)

    # Ownership

    async def release(self, execution_id: str) -> None:
        """Record that no replica owns an execution of this one."""
        backoff = Backoff()
        while (execution := await self.owned(execution_id)) is not None:
            try:
                await self._store.save(dataclasses.replace(execution, holder=None))
            except VersionConflict:
                continue
            except TemporaryError as error:
                log.warning(
                    "execution.not_released", execution_id=execution_id, error=error.message
                )
                await backoff.pause()
            else:
                log.info("execution.released", execution_id=execution_id)
                return

    async def announce_released(self) -> None:
        """Notify other replicas that executions have no owner."""
        with contextlib.suppress(TemporaryError):
            # Otherwise their next sweep finds them.
            await self._coordination.notify(RELEASED)

    async def revoke_unanswered(self, execution_id: str) -> None:
        """
        Revoke an execution whose record may or may not have been written. The client got an error
        and does not know its id, so it must not run when the database is back.
        """
        execution = await self.owned(execution_id)
        if execution is not None:
            await self.revoke(execution)

    async def revoke(self, execution: Execution) -> None:
        """
        Record that an execution was not accepted and did not run, unless its record has changed
        since it was read: then its request was repeated, and it runs.
        """
        message = (
            "The database did not answer in time when the execution was submitted; it was not run."
        )
        outcome = without_result(ExecutionStatus.CRASHED, Cause.DRIVER, message)
        ended = execution.ended(outcome, at=self._clock.now(), node_id=self._replica.node_id)
        with contextlib.suppress(OwnedElsewhere):
            await self.store_result(ended, overwrite=False)
            await self.announce_end(execution.id)

    # The end

    async def save(self, execution: Execution, event: Event) -> Execution:
        """Write the execution, with its event. May conflict."""
        row = await self._offload.store(execution)
        stored = await self._store.save(row, event=event)
        if row is execution:
            return stored
        return dataclasses.replace(execution, version=stored.version, kept=stored.kept)

    async def store_result(self, execution: Execution, *, overwrite: bool = True) -> Execution:
        """
        Store the result, however long that takes. Returns the stored execution: this one, or that
        of a replica that was faster. Raises `OwnedElsewhere` if another replica runs it now.

        With `overwrite` it replaces a newer record of this replica, which has written it without
        getting the database's answer; without, that record stays, and `OwnedElsewhere` is raised.
        """
        event = execution_event(execution, execution.status, self._clock.now())
        backoff = Backoff()
        while True:
            try:
                return await self.save(execution, event)
            except TemporaryError as error:
                log.warning("execution.not_stored", execution_id=execution.id, error=error.message)
                await backoff.pause()
            except VersionConflict:
                found = await self.get(execution.id)
                if found is not None and found.status.ended:
                    return await self.complete(found)
                if found is None or found.holder != self._replica.id or not overwrite:
                    raise OwnedElsewhere from None
                execution = dataclasses.replace(execution, version=found.version)

    async def announce_end(self, execution_id: str) -> None:
        """Wake all tasks, on any replica, that wait for the end of an execution."""
        try:
            await self._coordination.notify(end_topic(execution_id))
        except TemporaryError as error:
            # Other replicas also poll the record.
            log.info("execution.not_announced", execution_id=execution_id, error=error.message)

    async def wait_for_end(self, execution: Execution) -> Execution:
        """The execution after another replica has ended it."""
        while not execution.status.ended:
            try:
                found = await self.wait(execution.id, MAX_WAIT)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution.id, error=error.message)
                continue
            if found is None:
                raise NotFound(
                    f"Execution {execution.id} does not exist any more.",
                    code="execution_not_found",
                )
            execution = found
        return await self.complete(execution)

    async def wait(self, execution_id: str, seconds: float) -> Execution | None:
        """The record when it has ended, or its current state after so many seconds."""
        deadline = self._clock.monotonic() + seconds
        while True:
            with contextlib.suppress(CoordinationUnavailable):
                async with self._coordination.listen(end_topic(execution_id)) as notifications:
                    return await self._wait(execution_id, notifications, deadline)
            # Pause before the read, because a failing read may return at once.
            left = deadline - self._clock.monotonic()
            await asyncio.sleep(max(0.0, min(left, UNNOTIFIED_READ_INTERVAL)))
            execution = await self._store.get(execution_id)
            if execution is None or execution.status.ended or left <= UNNOTIFIED_READ_INTERVAL:
                return execution

    async def _wait(
        self, execution_id: str, notifications: Subscription, deadline: float
    ) -> Execution | None:
        while True:
            left = deadline - self._clock.monotonic()
            try:
                execution = await self._store.get(execution_id)
                if execution is None or execution.status.ended or left <= 0:
                    return execution
            except TemporaryError:
                if left <= 0:
                    raise
            await notifications.wait(min(left, READ_INTERVAL))


def end_topic(execution_id: str) -> str:
    """Topic: the execution may have ended."""
    return f"ended:{execution_id}"
