"""
Submits executions: records them, and hands them to the runner.

A repeated submission with the same id gets the execution of the first one. The same id with other
work is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from atoll import ids
from atoll.errors import (
    AtollError,
    Conflict,
    CoordinationUnavailable,
    InvalidRequest,
    PermanentError,
    TemporaryError,
    VersionConflict,
)
from atoll.model.execution import Execution, ExecutionStatus, Request

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.service.contexts.service import Contexts
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.executions.run import Run
    from atoll.service.executions.runner import Runner
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.settings import ExecutionSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    session_id: str
    request: Request
    execution_id: str | None = None
    invocation_id: str | None = None
    after: Execution | None = None
    """The failed execution of the invocation that this one follows."""

    @property
    def repeatable(self) -> bool:
        """Whether a repeated request can be recognised."""
        return self.execution_id is not None or self.invocation_id is not None


class Overtaken(Conflict):
    """Another execution already has the place of this one in the invocation."""


class Submitter:
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        records: ExecutionRecords,
        runner: Runner,
        contexts: Contexts,
        settings: ExecutionSettings,
    ) -> None:
        self._replica = replica
        self._store = replica.store
        self._sessions = sessions
        self._records = records
        self._runner = runner
        self._contexts = contexts
        self._max_timeout = settings.max_timeout.total_seconds()
        self._queue_limit = settings.queue_limit
        self._submitting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks of the execution ids that are being submitted."""

    async def submit(self, submission: Submission) -> Run:
        """
        Record the execution and start it as soon as its session has a free slot. Raises `Overtaken`
        if the invocation has another execution in its place.
        """
        if submission.request.timeout > self._max_timeout:
            raise InvalidRequest(
                f"timeout: at most {self._max_timeout:g} seconds are allowed here.",
                field="timeout",
            )
        execution_id = submission.execution_id
        if execution_id is None:
            return await self._record(submission)
        # One request at a time: the next one would mistake an execution that is recorded but not
        # started yet for a lost one.
        lock = self._submitting.setdefault(execution_id, asyncio.Lock())
        async with lock:
            if (
                self._runner.get(execution_id) is not None
                # A new record would start the session, which a repeated request must not do.
                or submission.request.context_id is not None
                or self._sessions.connections.reachable(submission.session_id) is None
            ):
                existing = await self._existing(execution_id, submission)
                if existing is not None:
                    return existing
            try:
                return await self._record(submission)
            except AtollError:
                # A repeated request finds its execution also where no new one may be submitted.
                existing = await self._existing(execution_id, submission)
                if existing is None:
                    raise
                return existing

    async def repeat(self, execution: Execution) -> Run:
        """The recorded execution, without comparing requests."""
        lock = self._submitting.setdefault(execution.id, asyncio.Lock())
        async with lock:
            run = self._runner.get(execution.id)
            if run is not None:
                return run
            stored = await self._store.executions.get(execution.id)
            return await self._run_of(stored or execution)

    async def _record(self, submission: Submission) -> Run:
        session_id, request = submission.session_id, submission.request
        if request.context_id is not None:
            await self._contexts.check(session_id, request)
        connection, stopped_at = self._sessions.connections.reachable(session_id), None
        if connection is not None:
            instance_id: str | None = connection.instance.id
            capacity = connection.session.capacity
        else:
            session = await self._sessions.starter.startable(session_id)
            instance_id, capacity = session.instance_id, session.capacity
            stopped_at = session.rested_at
        if not self._replica.leases.valid:
            raise CoordinationUnavailable("Redis does not answer, so nothing new can be started.")
        now = self._replica.clock.now()
        if stopped_at is not None:
            # Later than the stop, even if another machine's clock recorded it: so this execution
            # starts the session.
            now = max(now, stopped_at + timedelta(microseconds=1))
        with self._runner.slots.of(session_id, capacity) as queue:
            if queue.waiting >= self._queue_limit:
                raise TemporaryError(
                    f"{queue.waiting} executions are waiting for session {session_id} already.",
                    code="session_busy",
                )
            with queue.joining():
                execution = self._execution(submission, instance_id, now)
                try:
                    execution = await self._store_new(execution, submission)
                except Conflict as error:
                    # The same request was faster, here or at a replica that was taken for lost.
                    existing = await self._existing(execution.id, submission)
                    if existing is not None:
                        return existing
                    raise Overtaken(
                        f"Invocation {execution.invocation_id} has another execution already.",
                        code="invocation_id_in_use",
                    ) from error
            return self._runner.start(execution, capacity)

    def _execution(
        self, submission: Submission, instance_id: str | None, now: datetime
    ) -> Execution:
        execution_id = submission.execution_id or ids.execution_id(now)
        after = submission.after
        return Execution(
            id=execution_id,
            invocation_id=submission.invocation_id or ids.invocation_id(execution_id),
            ordinal=1 if after is None else after.ordinal + 1,
            invoked_at=None if after is None else after.invoked_at or after.created_at,
            session_id=submission.session_id,
            request=submission.request,
            status=ExecutionStatus.PENDING,
            created_at=now,
            # Where it is expected to begin: if the session has another instance later, the
            # execution may have been lost with this one.
            instance_id=instance_id,
            holder=self._replica.id,
        )

    async def _store_new(self, execution: Execution, submission: Submission) -> Execution:
        was_unavailable = self._store.unavailable
        try:
            return await self._records.add(execution, after=submission.after)
        except TemporaryError:
            # A repeatable request finds the record, if it was written. While the database is known
            # to be unavailable nothing is written, and no task may wait for each refused call.
            if not submission.repeatable and not was_unavailable:
                self._replica.background.start(
                    self._records.revoke_unanswered(execution.id), f"revoke {execution.id}"
                )
            raise

    async def _existing(self, execution_id: str, submission: Submission) -> Run | None:
        """The execution with this id; `Conflict` if it is other work."""
        run = self._runner.get(execution_id)
        execution = None if run is None else run.execution
        if execution is None:
            execution = await self._store.executions.get(execution_id)
        if execution is None:
            return None
        if execution.session_id != submission.session_id:
            raise Conflict(
                f"Execution {execution_id} belongs to another session.", code="execution_id_in_use"
            )
        if submission.invocation_id not in (None, execution.invocation_id):
            raise Conflict(
                f"Execution {execution_id} belongs to another invocation.",
                code="execution_id_in_use",
            )
        await self._check_same_work(execution, submission.request, run)
        return run or await self._run_of(execution)

    async def _run_of(self, stored: Execution) -> Run:
        """A recorded execution that is not in flight here."""
        while stored.holder == self._replica.id and not stored.status.ended:
            # Recorded here, and the store's answer was lost. It is written once more, so that the
            # reconciler does not take it for an execution without an owner.
            capacity = await self._sessions.records.capacity_here(stored.session_id)
            try:
                stored = await self._store.executions.save(stored)
            except VersionConflict:
                newest = await self._store.executions.get(stored.id)
                if newest is None:
                    break
                stored = newest
                continue
            return await self._runner.start_from_record(stored, capacity or 1)
        return self._runner.stand_in(await self._records.complete(stored))

    async def _check_same_work(
        self, execution: Execution, request: Request, run: Run | None
    ) -> None:
        try:
            if run is not None and not run.from_record:
                first = execution.request  # Complete, as it was submitted here.
            else:
                first = await self._records.request_of(execution)
        except (PermanentError, TemporaryError):
            return  # The blob store cannot provide it: there is nothing to compare with.
        if not first.same_work(request):
            raise Conflict(
                f"Execution {execution.id} exists with other code, command or input. Use a new id "
                "for new work.",
                code="execution_id_in_use",
            )
