"""
One attempt at an execution: connect → dispatch or attach → wait → conclude.

Whatever happens, an attempt has an outcome, unless a back-end is unavailable, the lease is lost, or
the session has moved: then it raises, and the runner decides. A request names how many executions
may run at once, and the executor refuses more, because a lost replica may have left one in the
session. It runs an id once, so dispatching again is safe for as long as the instance lives.

The executor ends an execution at its time-out. One that does not, because user code obstructs it or
a hostile image has replaced it, is not waited for: a little later its instance is ended from
outside, and the execution has timed out, which is not retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    AtollError,
    BackendUnavailable,
    NodeUnreachable,
    PermanentError,
    SessionEnded,
    SessionNotRunning,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import (
    ContextUnavailable,
    ExecutorError,
    ExecutorShuttingDown,
    LinkLost,
    ProtocolViolation,
    RunAcknowledged,
    SessionBusy,
    StaleSession,
)
from atoll.link.values import parse_value
from atoll.model.execution import Execution, ExecutionStatus, Outcome
from atoll.model.instance import State
from atoll.model.outcome import conclude, timed_out, without_result
from atoll.model.retry import RETRIED_CAUSES
from atoll.model.session import Cause
from atoll.service.executions.outcomes import (
    cancellation,
    outcome_of_missing,
    outcome_of_stop,
    outcome_with_output,
)
from atoll.service.executions.records import OwnedElsewhere
from atoll.service.executions.run import Interrupted
from atoll.service.executions.status_writer import StatusWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from atoll.coordination.leases import Lease, Presence
    from atoll.drivers.base import Driver
    from atoll.link.messages import RunResult
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.executions.run import Run
    from atoll.service.executions.run_request import RunRequests
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

OVERDUE = 10.0
"""Seconds after its time-out when an execution without a result is ended with its instance."""
LAST_ATTACH = 3.0
"""Seconds in which the result of an overdue execution may still arrive."""
JOURNAL_TIMEOUT = 30.0
"""Seconds in which an executor has to send a result of the instance that it replaced."""
REATTACH_PAUSE = 0.5
EXIT_TIMEOUT = 10.0
"""Seconds that an executor needs at most to exit after a shutdown request."""


class RecordChanged(Exception):
    """The record has changed since this replica read it, perhaps by a write of its own."""


class SessionMoved(Exception):
    """The session is on another node now, whose replicas own its executions."""


class _NoResult(Exception):
    """The attempt ended without a result of the executor; `outcome` takes its place."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Attempts:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        sessions: SessionAccess,
        records: ExecutionRecords,
        requests: RunRequests,
        settings: ExecutionSettings,
    ) -> None:
        self._store = replica.store
        self._clock = replica.clock
        self._driver = driver
        self._sessions = sessions
        self._records = records
        self._requests = requests
        self._settings = settings

    async def make(self, run: Run, lease: Lease, presence: Presence) -> Outcome | None:
        """
        Dispatch the execution; null if the executor has refused it, and it may be dispatched again.
        `presence` is that in which this replica took ownership.
        """
        return await self._guarded(run, self._dispatch(run, lease, presence))

    async def rejoin(self, run: Run) -> Outcome | None:
        """
        Attach to an execution that may have started before; null if it certainly has not.

        An executor forgets an execution only after its result is stored. So one that does not know
        it, in the instance that the session had when the execution was submitted, never had it.
        """
        return await self._guarded(run, self._rejoin(run))

    async def _guarded(self, run: Run, work: Awaitable[Outcome | None]) -> Outcome | None:
        """Turn every error that the runner does not handle into an outcome."""
        try:
            async with StatusWriter(run, self._store, self._clock):
                return await work
        except _NoResult as ended:
            return ended.outcome
        except (BackendUnavailable, Interrupted, OwnedElsewhere, RecordChanged, SessionMoved):
            raise
        except ProtocolViolation as violation:
            # The same image would do the same again, so there is no other attempt.
            return outcome_with_output(
                run, ExecutionStatus.FAILED, Cause.PROTOCOL, violation.message
            )
        except Exception as error:  # Every execution must get an outcome, even after a bug.
            log.error("execution.internal_error", execution_id=run.id, exc_info=error)
            message = "Internal error. See the server log."
            return without_result(ExecutionStatus.CRASHED, Cause.DRIVER, message)

    # Connect

    async def _connect(self, run: Run) -> Connection:
        """
        Connect to the session's instance, or to the one that replaces it. The journal stays with
        the workspace, so a new instance knows how executions of the old one ended.
        """
        execution = run.execution
        try:
            return await self._sessions.starter.connect(
                execution.session_id, submitted_at=execution.created_at
            )
        except (ProtocolViolation, BackendUnavailable):
            raise
        except NodeUnreachable as error:
            raise SessionMoved from error
        except AtollError as error:
            if isinstance(error, (SessionEnded, SessionNotRunning)):
                run.stop_with(await self._sessions.records.get(execution.session_id))
            if run.stopped:
                raise _NoResult(outcome_of_stop(run)) from error
            raise _NoResult(
                without_result(ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, error.message)
            ) from error

    # Dispatch

    async def _dispatch(self, run: Run, lease: Lease, presence: Presence) -> Outcome | None:
        self._check_stop(run)
        connection = await self._connect(run)
        if run.execution.instance_id is None:
            await self._record_instance(run, connection)
        # An earlier memory kill in the instance is not this execution's.
        await self._driver.limits.out_of_memory(connection.instance.handle)
        execution = await self._with_complete_request(run)
        self._check_stop(run)
        try:
            request = await self._requests.make(connection, execution)
        except PermanentError as error:
            return outcome_of_missing(error)
        self._check_stop(run)
        # Check at the last moment: a replica that is considered lost must not send anything.
        lease.check()
        presence.check()
        run.dispatched(execution.request, connection.instance.id, self._clock.now())
        deadline = self._deadline(execution)
        try:
            async with asyncio.timeout(self._left(deadline)):
                raw = await connection.link.run(request, run, run.events.intake(requested=True))
        except TimeoutError:
            return await self._end_overdue(run, connection)
        except ProtocolViolation:
            raise
        except LinkLost:
            return await self._after_link_loss(run, connection, deadline)
        except ExecutorError as error:
            return await self._after_refusal(run, connection, error)
        return await self._conclude(run, connection, raw)

    async def _record_instance(self, run: Run, connection: Connection) -> None:
        """
        Record where the next attempt begins: after a takeover, an execution that was lost with its
        instance differs from one that never began.
        """
        placed = dataclasses.replace(run.execution, instance_id=connection.instance.id)
        try:
            run.placed(await self._store.executions.save(placed))
        except VersionConflict:
            raise RecordChanged from None

    async def _with_complete_request(self, run: Run) -> Execution:
        """The execution as it was submitted; the record may have only the head of the request."""
        if not run.from_record:
            return run.execution
        try:
            request = await self._records.request_of(run.execution)
        except PermanentError as error:
            raise _NoResult(
                without_result(ExecutionStatus.CRASHED, Cause.DRIVER, error.message)
            ) from error
        return dataclasses.replace(run.execution, request=request)

    async def _after_refusal(
        self, run: Run, connection: Connection, error: ExecutorError
    ) -> Outcome | None:
        if isinstance(error, RunAcknowledged):
            raise OwnedElsewhere from error
        if isinstance(error, ContextUnavailable):
            return outcome_of_missing(error)
        if not isinstance(error, (SessionBusy, StaleSession, ExecutorShuttingDown)):
            return without_result(ExecutionStatus.CRASHED, Cause.DRIVER, error.message)
        run.refused()
        if isinstance(error, StaleSession):
            # The session was changed since this replica read it. If the refresh fails, the next
            # attempt connects anew.
            try:
                await self._sessions.connections.refresh(connection)
            except SessionEnded:
                run.stop_with(await self._sessions.records.get(run.execution.session_id))
            except BackendUnavailable:
                raise
            except TemporaryError as problem:
                log.info("session.not_refreshed", execution_id=run.id, error=problem.message)
        elif isinstance(error, ExecutorShuttingDown):
            # The instance exits; the one that takes its place runs the execution.
            await asyncio.wait([connection.link.closed], timeout=EXIT_TIMEOUT)
        elif not run.stopped:
            with run.waiting_for_others():
                await self._wait_for_end(connection, error.execution_id)
        return None

    async def _wait_for_end(self, connection: Connection, execution_id: str) -> None:
        """Wait for an execution of a lost replica; whoever adopts it stores its result."""
        log.info("session.busy", session_id=connection.session.id, execution_id=execution_id)
        with contextlib.suppress(ExecutorError, LinkLost):
            await connection.link.attach(execution_id, 0, None)

    # Attach

    async def _attach(self, run: Run, connection: Connection) -> RunResult:
        """
        Follow an execution that the executor has, from the last entry that arrived. Raises
        `ExecutorError` if it does not have it.
        """
        intake = run.events.intake(requested=False)
        return await connection.link.attach(run.id, run.events.sequence, run, intake)

    async def _connect_again(self, run: Run) -> Connection:
        """Connect as `_connect`, repeatedly while the instance that may run it may be alive."""
        deadline = self._deadline(run.execution)
        while True:
            try:
                return await self._connect(run)
            except _NoResult as failed:
                temporary = isinstance(failed.__cause__, TemporaryError)
                if run.stopped or not temporary or self._clock.monotonic() >= deadline:
                    raise
                if not await self._may_be_alive(run.execution.instance_id):
                    raise
                log.info("execution.reattach", execution_id=run.id, error=str(failed.__cause__))
                await asyncio.sleep(REATTACH_PAUSE)

    async def _may_be_alive(self, instance_id: str | None) -> bool:
        instance = None if instance_id is None else await self._store.instances.get(instance_id)
        if instance is None:
            return False
        state = (await self._driver.observe(instance.handle)).state
        return state not in (State.EXITED, State.GONE)

    async def _rejoin(self, run: Run) -> Outcome | None:
        connection = await self._connect_again(run)
        await self._forward_cancellation(run, connection)
        instance_id, started_at = run.execution.instance_id, run.execution.started_at
        if started_at is None:
            run.located(connection.instance.id, self._clock.now())
        # A part of the time-out has passed, but only wall clocks tell how much.
        deadline = self._deadline(run.execution)
        try:
            async with asyncio.timeout(self._left(deadline)):
                raw = await self._attach(run, connection)
        except TimeoutError:
            return await self._end_overdue(run, connection)
        except ProtocolViolation:
            raise
        except LinkLost:
            return await self._after_link_loss(run, connection, deadline)
        except ExecutorError:
            run.located(instance_id, started_at)
            if instance_id in (None, connection.instance.id):
                return None
            message = "The instance in which the execution may have started is gone."
            return outcome_with_output(run, ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, message)
        if started_at is None:
            # When it began, which is not when it was found.
            began = datetime.fromtimestamp(raw["began"], UTC)
            began = min(max(began, run.execution.created_at), self._clock.now())
            run.located(run.execution.instance_id, began)
        return await self._conclude(run, connection, raw)

    async def _forward_cancellation(self, run: Run, connection: Connection) -> None:
        """The request to cancel may have been lost with a link or a replica."""
        if run.cancelled:
            grace = self._settings.cancel_grace.total_seconds()
            with contextlib.suppress(ExecutorError, LinkLost):
                await connection.link.call("cancel", id=run.id, grace=grace)

    async def _reattach(self, run: Run, within: float) -> Outcome:
        """
        Connect to the session's instance again, and follow the execution there; its executor reads
        the journal of an instance that it replaced. Raises `ExecutorError` if it does not have the
        execution, and `TimeoutError` if it does not answer `within` so many seconds.
        """
        try:
            connection = await self._sessions.starter.connect(
                run.execution.session_id, submitted_at=run.execution.created_at
            )
        except NodeUnreachable as error:
            raise SessionMoved from error
        await self._forward_cancellation(run, connection)
        async with asyncio.timeout(within):
            raw = await self._attach(run, connection)
        return await self._conclude(run, connection, raw)

    async def _after_link_loss(self, run: Run, connection: Connection, deadline: float) -> Outcome:
        """Attach again while the instance may be running; then look into the journal it left."""
        handle = connection.instance.handle
        while not await self._session_has_ended(run) and (
            (await self._driver.observe(handle)).state not in (State.EXITED, State.GONE)
        ):
            try:
                return await self._reattach(run, self._left(deadline))
            except ExecutorError:
                break  # The executor never had the execution.
            except ProtocolViolation:
                raise
            except (AtollError, TimeoutError) as error:
                if self._clock.monotonic() >= deadline:
                    return await self._end_overdue(run, connection)
                log.info("execution.reattach", execution_id=run.id, error=str(error))
                await asyncio.sleep(REATTACH_PAUSE)
        if run.stopped_by is not None:
            return outcome_of_stop(run)
        # Before the instance is replaced, and its control group removed.
        out_of_memory = await self._driver.limits.out_of_memory(handle)
        try:
            return await self._reattach(run, JOURNAL_TIMEOUT)
        except (ProtocolViolation, BackendUnavailable):
            raise
        except (AtollError, TimeoutError) as error:
            log.info("execution.no_result", execution_id=run.id, error=str(error))
        observed = await self._driver.observe(handle)
        if out_of_memory or observed.cause is Cause.OOM:
            message = "The execution used more memory than it may, and its instance ended."
            return outcome_with_output(run, ExecutionStatus.FAILED, Cause.OOM, message)
        if observed.cause in RETRIED_CAUSES:
            message = observed.message or "The node ended the instance while the execution ran."
            return outcome_with_output(run, ExecutionStatus.CRASHED, observed.cause, message)
        if observed.cause is Cause.DISK:
            message = observed.message or "The execution used more disk than it may."
            return outcome_with_output(run, ExecutionStatus.FAILED, Cause.DISK, message)
        message = "The instance ended while the execution ran."
        return outcome_with_output(run, ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, message)

    # Time

    def _deadline(self, execution: Execution) -> float:
        """When an execution that begins now is overdue, on the monotonic clock."""
        return self._clock.monotonic() + execution.request.timeout + OVERDUE

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    async def _end_overdue(self, run: Run, connection: Connection) -> Outcome:
        """Take the result of an overdue execution if there is one by now; else end its instance."""
        try:
            async with asyncio.timeout(LAST_ATTACH):
                return await self._reattach(run, LAST_ATTACH)
        except (ProtocolViolation, BackendUnavailable):
            raise
        except (AtollError, TimeoutError) as error:
            log.info("execution.no_result", execution_id=run.id, error=str(error))
        instance = connection.instance
        log.warning("execution.overdue", execution_id=run.id, instance_id=instance.id)
        connection.link.close()
        try:
            await self._driver.stop(instance.handle, grace=timedelta(0))
        except TemporaryError as error:
            # A process that waits in the kernel, for a mount for example, ends when that answers.
            # The session gets no other instance until then.
            log.warning("instance.not_ended", instance_id=instance.id, error=error.message)
        return timed_out(stdout=run.events.output("stdout"), stderr=run.events.output("stderr"))

    # Conclude

    async def _conclude(self, run: Run, connection: Connection, raw: RunResult) -> Outcome:
        run.started()
        value, error = parse_value(run.events.value, self._settings.return_limit)
        if raw["reason"] == "shutdown" and await self._session_has_ended(run):
            # Another replica ended the session. The instance stays until its files are saved.
            self._sessions.connections.disconnect(connection.session.id)
            return outcome_of_stop(run)
        failed = raw["exit_code"] != 0 and raw["reason"] is None
        started_at = run.execution.started_at
        if started_at is not None:
            # An executor cannot claim more time than has passed.
            elapsed = max(0.0, (self._clock.now() - started_at).total_seconds())
            raw["duration"] = min(raw["duration"], elapsed)
        outcome = conclude(
            raw,
            stdout=run.events.output("stdout"),
            stderr=run.events.output("stderr"),
            return_json=value,
            error=error,
            out_of_memory=failed
            and await self._driver.limits.out_of_memory(connection.instance.handle),
        )
        if outcome.status is ExecutionStatus.CANCELLED and run.cancel_reason is not None:
            outcome = dataclasses.replace(outcome, error=cancellation(run))
        return outcome

    async def _session_has_ended(self, run: Run) -> bool:
        """Whether the session has ended or was stopped, perhaps by another replica."""
        if run.stopped_by is None:
            session = await self._sessions.records.get(run.execution.session_id)
            if session.status.ended or session.stopped_since(run.execution.created_at):
                run.stop_with(session)
        return run.stopped_by is not None

    def _check_stop(self, run: Run) -> None:
        if run.stopped:
            raise _NoResult(outcome_of_stop(run))
