"""
Runs the executions that this replica owns, one task each, from accepted to stored result.

An execution waits for a slot of its session (first come, first served within this replica), then
for the slot's lease (shared with other replicas), and then makes attempts until one has a final
outcome. An attempt that was lost through no fault of the code is followed by another after a pause,
as `model/retry.py` decides; it is recorded first, so the count is correct whichever replica
continues. An
execution that may have started under a lost replica, or before a lease was lost, is looked for in
its executor first. `commit.py` stores the outcome; while the database is unavailable the code keeps
running, and the result waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    BackendUnavailable,
    LeaseLost,
    PresenceLost,
    TemporaryError,
    VersionConflict,
)
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model import retry
from atoll.model.event import execution_event
from atoll.model.session import Cause
from atoll.service.backoff import Backoff
from atoll.service.executions.attempt import RecordChanged, SessionMoved
from atoll.service.executions.outcomes import outcome_of_stop
from atoll.service.executions.records import OwnedElsewhere, end_topic
from atoll.service.executions.run import Interrupted, Phase, Run
from atoll.service.executions.slots import SessionSlots
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.coordination.leases import Presence
    from atoll.model.execution import Execution, Outcome
    from atoll.model.session import Session
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.attempt import Attempts
    from atoll.service.executions.commit import ResultCommit
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

IMMEDIATE_DISPATCHES = 10
"""Dispatches that an executor may refuse before there is a pause between them."""


class Runner(SessionObserver):
    """Subscribes to sessions and to coordination in `app/executions.py`."""

    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        records: ExecutionRecords,
        attempts: Attempts,
        commit: ResultCommit,
        approvals: Approvals,
        settings: ExecutionSettings,
    ) -> None:
        self._replica = replica
        self._sessions = sessions
        self._records = records
        self._attempts = attempts
        self._commit = commit
        self._approvals = approvals
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self.slots = SessionSlots()

    # In flight

    def get(self, execution_id: str) -> Run | None:
        return self._runs.get(execution_id)

    @property
    def count(self) -> int:
        return len(self._runs)

    def session_ids(self) -> set[str]:
        """Sessions with executions in flight."""
        return {run.execution.session_id for run in self._runs.values()}

    def runs_of(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.execution.session_id == session_id]

    # Ownership

    def start(self, execution: Execution, capacity: int) -> Run:
        """Own an execution that this replica has just stored until it ends."""
        return self._start(Run(execution, self._settings, questions=self._approvals), capacity)

    async def start_from_record(self, execution: Execution, capacity: int) -> Run:
        """Own an execution that was found stored: it may have started already."""
        if (known := self._runs.get(execution.id)) is not None:
            return known
        run = self._start(
            Run(execution, self._settings, questions=self._approvals, from_record=True), capacity
        )
        # After the start: a cancellation that comes now reaches the run, whatever this raises.
        if await self._replica.coordination.cancelled(execution.id) is not None:
            self.cancellation_requested(execution.id)
        return run

    def _start(self, run: Run, capacity: int) -> Run:
        self._runs[run.id] = run
        with self.slots.of(run.execution.session_id, capacity) as queue:
            # Before the first await: slots are granted in the order of the calls.
            slot = queue.join(run.notify)
        work = self._drive(run, capacity, self._replica.leases.presence)
        run.begin(work, self._replica.background, slot)
        return run

    def stand_in(self, execution: Execution) -> Run:
        """A run that ends when the replica that owns the execution ends it."""
        run = Run(execution, self._settings)
        if execution.status.ended:
            run.finish(execution)
        else:
            self._follow(run)
        return run

    def _follow(self, run: Run) -> None:
        run.follow(self._await_owner(run), self._replica.background)

    async def _await_owner(self, run: Run) -> None:
        run.finish_from_record(await self._records.wait_for_end(run.execution))

    def detach(self) -> None:
        """Stop driving all runs but those that are being stopped; other replicas take them over."""
        for run in self._runs.values():
            if not run.stopped:
                run.detach()

    # To another node

    async def release_runs(self, session_id: str) -> list[Run]:
        """
        Stop driving the runs of a session that leaves this node. Pass them to `hand_over` when it
        has left.
        """
        runs = [run for run in self.runs_of(session_id) if not run.finished]
        tasks = [task for run in runs if (task := run.detach()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        released = [run for run in runs if not run.finished]
        for run in released:
            # Owned by this replica for as long as the record says so.
            self._runs[run.id] = run
        return released

    async def hand_over(self, runs: Sequence[Run]) -> None:
        """
        Release the runs to a replica that reaches their session; clients of this replica wait for
        its results.
        """
        for run in runs:
            await self.pass_cancellation_on(run)
            await self._records.release(run.id)
            if self._runs.get(run.id) is run:
                del self._runs[run.id]
            log.info("execution.owned_elsewhere", execution_id=run.id)
            self._follow(run)
        if runs:
            await self._records.announce_released()

    # Stops

    async def cancel(self, run: Run, reason: str | None = None) -> None:
        """Stop an execution: the executor asks the code to end, then kills it."""
        run.cancel(reason)
        connection = self._sessions.connections.reachable(run.execution.session_id)
        # If it has not started, the run itself ends. If it is just over, its result stands.
        if connection is not None:
            with contextlib.suppress(ExecutorError, LinkLost):
                grace = self._settings.cancel_grace.total_seconds()
                await connection.link.call("cancel", id=run.id, grace=grace)

    def cancellation_requested(self, execution_id: str) -> None:
        run = self._runs.get(execution_id)
        if run is not None:
            self._replica.background.start(self._cancel_as_requested(run), f"cancel {execution_id}")

    async def _cancel_as_requested(self, run: Run) -> None:
        reason = None
        with contextlib.suppress(TemporaryError):
            reason = await self._replica.coordination.cancelled(run.id)
        await self.cancel(run, reason or None)

    def coordination_restored(self) -> None:
        self._replica.background.start(self._find_cancellations(), "find cancellations")

    async def _find_cancellations(self) -> None:
        for execution_id in list(self._runs):
            if await self._replica.coordination.cancelled(execution_id) is not None:
                self.cancellation_requested(execution_id)

    def session_stopping(self, session: Session) -> None:
        self._stop_runs(session)

    def session_ended(self, session: Session) -> None:
        self._stop_runs(session)

    def _stop_runs(self, session: Session) -> None:
        for run in self.runs_of(session.id):
            if _ends_with(session, run.execution):
                run.stop_with(session)

    def session_connected(self, connection: Connection) -> None:
        if connection.link.hello["runs"]:
            work = self._acknowledge_stored(connection)
            self._replica.background.start(work, f"acknowledge results of {connection.instance.id}")

    async def _acknowledge_stored(self, connection: Connection) -> None:
        """Acknowledge results that are stored, and were not acknowledged before a link broke."""
        for run in connection.link.hello["runs"]:
            stored = await self._replica.store.executions.get(run["id"])
            if run["ended"] and (stored is None or stored.status.ended):
                connection.link.acknowledge(run["id"])

    # The life of a run

    async def _drive(self, run: Run, capacity: int, presence: Presence) -> None:
        """The whole life of a run. Read this first."""
        backoff, dispatches = Backoff(), 0
        with self.slots.of(run.execution.session_id, capacity):
            try:
                while not run.finished:
                    try:
                        if run.phase is Phase.UNCERTAIN:
                            await self._rejoin(run)
                            continue
                        await run.wait_for_slot()
                        await self._make_attempt(run, capacity, presence)
                        dispatches += 1
                        if dispatches > IMMEDIATE_DISPATCHES and not run.finished:
                            # A hostile image can refuse forever, and must not cause a busy loop.
                            await backoff.pause()
                    except PresenceLost:
                        presence = self._replica.leases.presence
                        await self._check_ownership(run)
                    except LeaseLost:
                        await self._check_ownership(run)
                    except RecordChanged:
                        await self._check_ownership(run)
                        await backoff.pause()
                    except SessionMoved:
                        return await self.hand_over([run])
                    except BackendUnavailable as error:
                        # It may have been dispatched before, and must start only once.
                        run.interrupted()
                        log.warning(
                            "execution.waits",
                            execution_id=run.id,
                            phase=run.phase,
                            error=error.message,
                        )
                        await backoff.pause()
            except OwnedElsewhere:
                await self._follow_owner(run)
            except Exception as error:  # A bug; clients must not wait for the result forever.
                log.error("execution.internal_error", execution_id=run.id, exc_info=error)
                self._follow(run)
            finally:
                run.leave_slot()
                self._runs.pop(run.id, None)

    async def _follow_owner(self, run: Run) -> None:
        """Wait for the result of the replica that owns the execution now."""
        log.info("execution.owned_elsewhere", execution_id=run.id)
        await self.pass_cancellation_on(run)
        self._follow(run)

    async def pass_cancellation_on(self, run: Run) -> None:
        """Let the next owner of a cancelled execution know, if Redis answers."""
        if run.cancelled and not run.finished:
            with contextlib.suppress(TemporaryError):
                await self._replica.coordination.cancel(run.id, run.cancel_reason or "")

    async def _make_attempt(self, run: Run, capacity: int, presence: Presence) -> None:
        if run.stopped:
            await self._retry_or_commit(run, outcome_of_stop(run))
            return
        key, *others = _lease_keys(run.execution.session_id, run.slot_number, capacity)
        lease = self._replica.leases.lease(
            key, run.id, alternatives=others, topic=end_topic(run.id)
        )
        failed = None
        with contextlib.suppress(Interrupted):
            async with contextlib.AsyncExitStack() as stack:
                with run.waiting_for_others():
                    await stack.enter_async_context(lease)
                outcome = await self._attempts.make(run, lease, presence)
                if outcome is not None:
                    failed = await self._commit_or_fail(run, outcome)
        # Without the lease: other replicas may use the session during the pause.
        if failed is not None:
            await self._retry(run, failed)
        elif run.finished and not lease.released:
            await self._records.announce_end(run.id)

    async def _rejoin(self, run: Run) -> None:
        """
        Attach to an execution that may have started, and follow it to its end. That needs neither
        slot nor lease, since it starts nothing; of two replicas that do so, the record's version
        lets one win.
        """
        outcome = await self._attempts.rejoin(run)
        if outcome is None:
            run.not_started()
        else:
            await self._retry_or_commit(run, outcome)

    async def _retry_or_commit(self, run: Run, outcome: Outcome) -> None:
        failed = await self._commit_or_fail(run, outcome)
        if failed is not None:
            await self._retry(run, failed)
        else:
            await self._records.announce_end(run.id)

    async def _commit_or_fail(self, run: Run, outcome: Outcome) -> Outcome | None:
        """Commit the outcome, unless the attempt is to be retried: then return why it failed."""
        if not self._is_retried(run, outcome):
            secured = await self._commit.secure(run.execution, outcome)
            if not self._is_retried(run, secured):
                await self._commit.commit(run, outcome)
                return None
            outcome = secured
        return outcome

    def _is_retried(self, run: Run, outcome: Outcome) -> bool:
        return not run.stopped and retry.is_retried(run.execution, outcome, self._settings.retries)

    async def _retry(self, run: Run, outcome: Outcome) -> None:
        """Record that the attempt is lost, and pause before the next one."""
        execution, now = run.execution, self._replica.clock.now()
        following = execution.retried(outcome, at=now, node_id=self._replica.node_id)
        try:
            event = execution_event(following, "retried", now)
            following = await self._replica.store.executions.save(following, event=event)
        except VersionConflict:
            raise RecordChanged from None
        pause = retry.delay(
            following.retry_count,
            first=self._settings.retry_backoff,
            most=self._settings.retry_max_backoff,
        )
        message = None if outcome.error is None else outcome.error.get("message")
        log.warning(
            "execution.retried",
            execution_id=execution.id,
            cause=outcome.cause,
            retry=following.retry_count,
            pause=pause.total_seconds(),
        )
        self._approvals.forget(run)
        details = {"cause": outcome.cause, "message": message, "delay": pause.total_seconds()}
        run.next_attempt(following, details)
        await run.back_off(pause)

    async def _check_ownership(self, run: Run) -> None:
        """
        Continue an interrupted run with the record's version, whose last write may have got no
        answer. Raises `OwnedElsewhere` if another replica owns the execution.
        """
        # This replica alone may have dispatched it, as long as it owns it.
        run.interrupted()
        stored = await self._records.get(run.id)
        if stored is None or stored.holder != self._replica.id:
            raise OwnedElsewhere
        if stored.status.ended:
            # The interrupted write has stored the result.
            self._commit.finish(run, await self._records.complete(stored), own=False)
            await self._records.announce_end(run.id)
        else:
            run.version_read(stored.version)


def _ends_with(session: Session, execution: Execution) -> bool:
    """Whether the end or the stop of its session ends the execution."""
    if session.status.ended or session.rested_at is None:
        return True  # Without a request, its instance is stopped because its node is drained.
    if session.cause is Cause.IDLE and execution.started_at is None:
        return False  # It was submitted while the session seemed idle, and starts it again.
    # An execution that was submitted after the stop starts the session again too.
    return session.stopped_since(execution.created_at)


def _lease_keys(session_id: str, slot: int, capacity: int) -> list[str]:
    """The session's slots as leases, the preferred one first: any may be in use elsewhere."""
    slots = [(slot + further) % capacity for further in range(capacity)]
    return [session_id if number == 0 else f"{session_id}#{number}" for number in slots]
