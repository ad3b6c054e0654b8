"""
Runs the executions that this replica owns, one task each, from accepted to stored result.

An execution waits for a slot of its session (first come, first served within this replica), then
for the slot's lease (shared with other replicas), and then makes attempts until one has a final
outcome. An attempt that was lost through no fault of the code is followed by another after a pause,
as `model/retry.py` decides; it is recorded first, so the count is correct whichever replica
continues. An execution that may have started under a lost replica, or before a lease was lost, is
looked for in its executor first.

The outcome is committed by compare-and-set before any client learns of it, and acknowledged to the
executor after the commit: a replica that dies in between leaves the result in the executor's
journal, where its successor finds it. A replica that lost the execution to another is refused by
the record's version, and waits for that one's result. While the store is unavailable, the code
continues and the result waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from atoll.errors import BackendUnavailable, Conflict, LeaseLost, TemporaryError
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model import retry
from atoll.model.event import execution_event
from atoll.model.execution import ExecutionStatus
from atoll.model.outcome import lost
from atoll.model.session import Cause
from atoll.service.backoff import Backoff
from atoll.service.executions.attempt import (
    ReplicaWasLost,
    SessionMoved,
    StaleRecord,
    Superseded,
)
from atoll.service.executions.outcomes import outcome_of_stop
from atoll.service.executions.run import Interrupted, Run
from atoll.service.executions.slots import SlotQueue
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from atoll.model.execution import Execution, Outcome
    from atoll.model.session import Session
    from atoll.service.executions.attempt import Attempts
    from atoll.service.executions.parts import ExecutionParts
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.observers import SessionObservers
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

IMMEDIATE_DISPATCHES = 10
"""Dispatches that an executor may refuse before there is a pause between them."""
REPLICA_LEFT = "leaving"
"""Topic: executions have no owner, because a replica shuts down or has released them."""


class Runner(SessionObserver):
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        attempts: Attempts,
        shared: ExecutionParts,
        autosave: Autosave,
        observers: SessionObservers,
        settings: ExecutionSettings,
    ) -> None:
        self._replica = replica
        self._store = replica.store
        self._leases = replica.leases
        self._background = replica.background
        self._clock = replica.clock
        self._sessions = sessions
        self._attempts = attempts
        self._completions = shared.completions
        self._offload = shared.offload
        self._approvals = shared.approvals
        self._autosave = autosave
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self._queues: dict[str, SlotQueue] = {}
        self.finished: Counter[str] = Counter()
        """Executions that have ended here, by status."""
        self.seconds = 0.0
        """How long they took together."""
        observers.subscribe(self)
        replica.coordination.subscribe(self)

    # What is under way

    def get(self, execution_id: str) -> Run | None:
        return self._runs.get(execution_id)

    @property
    def count(self) -> int:
        return len(self._runs)

    def session_ids(self) -> set[str]:
        """Sessions with unfinished executions."""
        return {run.execution.session_id for run in self._runs.values()}

    def runs_of(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.execution.session_id == session_id]

    @contextlib.contextmanager
    def queue(self, session_id: str, capacity: int) -> Iterator[SlotQueue]:
        """The session's slots on this replica."""
        queue = self._queues.get(session_id)
        if queue is None:
            queue = self._queues[session_id] = SlotQueue(capacity)
        try:
            yield queue
        finally:
            # Another queue may have taken the place of an unused one.
            if not queue.used and self._queues.get(session_id) is queue:
                del self._queues[session_id]

    # Ownership

    def start(self, execution: Execution, capacity: int, *, adopted: bool = False) -> Run:
        """Own a stored execution until it ends; an adopted one may have started already."""
        run = Run(execution, self._settings, questions=self._approvals, adopted=adopted)
        self._runs[execution.id] = run
        with self.queue(execution.session_id, capacity) as queue:
            # Before the first await: slots are granted in the order of the calls.
            slot = queue.join(run.notify)
        run.begin(self._drive(run, capacity, self._leases.losses), self._background, slot)
        return run

    async def adopt(self, execution: Execution) -> None:
        """Take over an execution of a lost replica, unless another replica is faster."""
        if execution.id in self._runs:
            return
        capacity = await self.capacity_here(execution.session_id)
        if capacity is None:
            return
        try:
            execution = await self._store.executions.save(
                dataclasses.replace(execution, holder=self._replica.id)
            )
        except Conflict:
            return
        log.info("execution.adopted", execution_id=execution.id)
        self.start(execution, capacity, adopted=True)
        # After the start: a cancellation that comes now reaches the run, whatever this raises.
        if await self._replica.coordination.cancelled(execution.id) is not None:
            self.cancellation_requested(execution.id)

    async def capacity_here(self, session_id: str) -> int | None:
        """The session's capacity; null if it is on a node that this replica does not reach."""
        session = await self._store.sessions.get(session_id)
        if session is None:
            return 1
        return session.capacity if self._sessions.records.is_here(session) else None

    def stand_in(self, execution: Execution) -> Run:
        """A run that ends when the replica that owns the execution ends it."""
        run = Run(execution, self._settings)
        if execution.status.ended:
            run.finish(execution)
        else:
            self._follow(run)
        return run

    def _follow(self, run: Run) -> None:
        run.follow(self._await_owner(run), self._background)

    async def _await_owner(self, run: Run) -> None:
        run.finish_from_record(await self._completions.wait_for_end(run.execution))

    async def revoke_later(self, execution_id: str) -> None:
        """
        Revoke an execution whose record may or may not have been written: its client got an error,
        so it must not run when the store is back.
        """
        stored = await self._completions.stored(execution_id)
        if stored is not None and not stored.status.ended:
            await self.revoke(stored)

    async def revoke(self, execution: Execution) -> None:
        """Record that an execution was never accepted, and did not run."""
        message = (
            "The database did not answer in time when the execution was submitted; it was not run."
        )
        outcome = lost(ExecutionStatus.CRASHED, Cause.DRIVER, message, stdout=b"", stderr=b"")
        with contextlib.suppress(Superseded):
            await self._commit(Run(execution, self._settings), outcome)

    def detach(self) -> None:
        """Stop driving all runs; another replica takes over what goes on."""
        for run in self._runs.values():
            if run.ended_session is None:
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
            await self.release(run.id)
            if self._runs.get(run.id) is run:
                del self._runs[run.id]
            self._follow_owner(run)
        if runs:
            with contextlib.suppress(TemporaryError):
                await self._replica.coordination.notify(REPLICA_LEFT)

    async def release(self, execution_id: str) -> None:
        """Record that no replica owns an execution of this one, when the store is available."""
        backoff = Backoff()
        while True:
            stored = await self._completions.stored(execution_id)
            if stored is None or stored.status.ended or not self._is_own(stored):
                return
            try:
                await self._store.executions.save(dataclasses.replace(stored, holder=None))
            except Conflict:
                continue
            except TemporaryError as error:
                log.warning(
                    "execution.not_released", execution_id=execution_id, error=error.message
                )
                await backoff.pause()
            else:
                log.info("execution.released", execution_id=execution_id)
                return

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
            self._background.start(self._cancel_as_requested(run), f"cancel {execution_id}")

    async def _cancel_as_requested(self, run: Run) -> None:
        reason = None
        with contextlib.suppress(TemporaryError):
            reason = await self._replica.coordination.cancelled(run.id)
        await self.cancel(run, reason or None)

    def coordination_restored(self) -> None:
        self._background.start(self._find_cancellations(), "find cancellations")

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
            if _is_stopped_by(session, run.execution):
                run.session_ended(session)

    def session_connected(self, connection: Connection) -> None:
        if connection.link.hello["runs"]:
            work = self._acknowledge_stored(connection)
            self._background.start(work, f"settle journal of {connection.instance.id}")

    async def _acknowledge_stored(self, connection: Connection) -> None:
        """Acknowledge results that are stored, and were not acknowledged before a link broke."""
        for run in connection.link.hello["runs"]:
            stored = await self._store.executions.get(run["id"])
            if run["ended"] and (stored is None or stored.status.ended):
                connection.link.acknowledge(run["id"])

    # The life of a run

    async def _drive(self, run: Run, capacity: int, losses: int) -> None:
        """The whole life of a run. Read this first."""
        backoff, dispatches = Backoff(), 0
        with self.queue(run.execution.session_id, capacity):
            try:
                while not run.finished:
                    try:
                        if run.may_have_started:
                            await self._rejoin(run)
                            continue
                        await run.wait_for_slot()
                        await self._make_attempt(run, capacity, losses)
                        dispatches += 1
                        if dispatches > IMMEDIATE_DISPATCHES and not run.finished:
                            # A hostile image can refuse forever, and must not cause a busy loop.
                            await backoff.pause()
                    except LeaseLost as error:
                        if isinstance(error, ReplicaWasLost):
                            losses = self._leases.losses
                        # This replica alone may have dispatched it, as long as it owns it.
                        run.unsettle()
                        if not await self._still_owned(run):
                            return self._follow_owner(run)
                    except StaleRecord:
                        if not await self._read_version(run):
                            return self._follow_owner(run)
                        run.unsettle()
                        await backoff.pause()
                    except Superseded:
                        return self._follow_owner(run)
                    except SessionMoved:
                        return await self.hand_over([run])
                    except BackendUnavailable as error:
                        # It may have been dispatched before, and must start only once.
                        run.unsettle()
                        log.warning(
                            "execution.waits",
                            execution_id=run.id,
                            phase=run.phase,
                            error=error.message,
                        )
                        await backoff.pause()
            finally:
                run.leave_slot()
                self._runs.pop(run.id, None)

    def _follow_owner(self, run: Run) -> None:
        """Another replica owns the execution: wait for its result."""
        log.info("execution.owned_elsewhere", execution_id=run.id)
        self._follow(run)

    async def _make_attempt(self, run: Run, capacity: int, losses: int) -> None:
        if run.stopped:
            await self._conclude(run, outcome_of_stop(run))
            return
        key, *others = _lease_keys(run.execution.session_id, run.slot_number, capacity)
        lease = self._leases.lease(key, run.id, alternatives=others)
        failed = None
        with contextlib.suppress(Interrupted):
            async with contextlib.AsyncExitStack() as stack:
                with run.waiting_for_others():
                    await stack.enter_async_context(lease)
                outcome = await self._attempts.make(run, lease, losses)
                if outcome is not None and self._is_retried(run, outcome):
                    failed = outcome
                elif outcome is not None:
                    await self._commit(run, outcome)
        # Without the lease: other replicas may use the session during the pause.
        if failed is not None:
            await self._retry(run, failed)
        elif run.finished:
            await self._completions.announce(run.id)

    async def _rejoin(self, run: Run) -> None:
        """
        Attach to an execution that may have started, and follow it to its end. That needs neither
        slot nor lease, since it starts nothing; of two replicas that do so, the record's version
        lets one win.
        """
        run.rejoining()
        outcome = await self._attempts.rejoin(run)
        if outcome is None:
            run.not_started()
        else:
            await self._conclude(run, outcome)

    async def _conclude(self, run: Run, outcome: Outcome) -> None:
        if self._is_retried(run, outcome):
            await self._retry(run, outcome)
        else:
            await self._commit(run, outcome)
            await self._completions.announce(run.id)

    def _is_retried(self, run: Run, outcome: Outcome) -> bool:
        return not run.stopped and retry.is_retried(run.execution, outcome, self._settings.retries)

    async def _retry(self, run: Run, outcome: Outcome) -> None:
        """Record that the attempt is lost, and pause before the next one."""
        execution, now = run.execution, self._clock.now()
        following = execution.retried(outcome, at=now, node_id=self._replica.node_id)
        try:
            event = execution_event(following, "retried", now)
            following = await self._store.executions.save(following, event=event)
        except Conflict:
            raise StaleRecord from None
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

    # The commit

    async def _commit(self, run: Run, outcome: Outcome) -> None:
        """Store the result, however long that takes; then let the executor and clients know."""
        connection = self._sessions.connections.reachable(run.execution.session_id)
        if connection is not None:
            await self._autosave.before_result(connection)
        outcome = run.events.with_log(outcome)
        now = self._clock.now()
        ended = run.execution.ended(outcome, at=now, node_id=self._replica.node_id)
        execution = await self._store_result(run, ended)
        connection = self._sessions.connections.reachable(execution.session_id)
        if connection is not None:
            connection.link.acknowledge(execution.id)
        self.finished[execution.status] += 1
        self.seconds += outcome.execution_time
        run.finish(execution)
        self._approvals.forget(run)

    async def _store_result(self, run: Run, execution: Execution) -> Execution:
        """The stored result: this one, or that of a replica that was faster."""
        event = execution_event(execution, execution.status, self._clock.now())
        backoff = Backoff()
        while True:
            try:
                row = await self._offload.put_away(execution)
                stored = await self._store.executions.save(row, event=event)
                if row is execution:
                    return stored
                return dataclasses.replace(execution, version=stored.version, kept=stored.kept)
            except TemporaryError as error:
                log.warning("execution.not_stored", execution_id=execution.id, error=error.message)
                await backoff.pause()
            except Conflict:
                found = await self._completions.stored(execution.id)
                if found is not None and found.status.ended:
                    result = await self._offload.fetch(found)
                    run.events.complete(result)
                    return result
                owned = found is not None and self._runs.get(run.id) is run and self._is_own(found)
                if found is None or not owned:
                    raise Superseded from None
                # This run has written the record itself, and the store's answer was lost.
                execution = dataclasses.replace(execution, version=found.version)

    # Owned by other replicas

    async def _still_owned(self, run: Run) -> bool:
        stored = await self._completions.stored(run.id)
        return stored is not None and not stored.status.ended and self._is_own(stored)

    async def _read_version(self, run: Run) -> bool:
        """
        Take the version of the record, whose last write got no answer. False if another replica
        owns the execution, or it has ended.
        """
        stored = await self._completions.stored(run.id)
        if (
            stored is None
            or stored.status.ended
            or not self._is_own(stored)
            or self._runs.get(run.id) is not run
        ):
            return False
        run.version_read(stored.version)
        return True

    def _is_own(self, stored: Execution) -> bool:
        return stored.holder == self._replica.id


def _is_stopped_by(session: Session, execution: Execution) -> bool:
    """Whether the end or the stop of its session ends the execution."""
    stopped_at = session.rested_at
    if session.status.ended or stopped_at is None:
        return True
    if session.cause is Cause.IDLE and execution.started_at is None:
        return False  # It was submitted while the session seemed idle, and starts it again.
    # An execution that was submitted after the stop starts the session again too.
    return execution.created_at <= stopped_at


def _lease_keys(session_id: str, slot: int, capacity: int) -> list[str]:
    """The session's slots as leases, the preferred one first: any may be in use elsewhere."""
    slots = [(slot + further) % capacity for further in range(capacity)]
    return [session_id if number == 0 else f"{session_id}#{number}" for number in slots]
