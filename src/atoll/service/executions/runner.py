"""
Executions under way on this replica, each seen through to its end.

As many at a time as the session's capacity, which is one unless it asked for more: a turn in the
line of this replica, then the lease of that place in the session, which stands in line with other
replicas. One that may have begun before (under a replica that was lost, or a lease that was) is
looked for first. An attempt that was lost by no fault of the code is followed by another after a
pause, as `model.retry` says; that is recorded before, so it holds whoever sees to it then.

The result is stored by compare-and-set before anybody is told, and acknowledged to the executor
only then: a replica that dies in between leaves it in the executor's journal, for the next one. A
replica that lost the execution to another is refused by its version and waits for that one's
result. While the store is away the code goes on and the result waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from atoll.service.executions.attempt import Elsewhere, StaleRecord, Superseded, cut_short
from atoll.service.executions.run import Run, SlotQueue
from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.model.execution import Execution, Outcome
    from atoll.model.session import Session
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.attempt import Attempts
    from atoll.service.executions.completion import Completions
    from atoll.service.executions.offload import Offload
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.observers import SessionObservers
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

QUICK_TRIES = 10
"""How often an execution that the executor did not take is tried again without a pause."""
REPLICA_LEFT = "leaving"
"""Message: executions lost their owner, because a replica ends or has released them."""


class Runner(SessionObserver):
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        attempts: Attempts,
        completions: Completions,
        offload: Offload,
        approvals: Approvals,
        autosave: Autosave,
        observers: SessionObservers,
        settings: ExecutionSettings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._background = replica.background
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._sessions = sessions
        self._attempts = attempts
        self._completions = completions
        self._offload = offload
        self._approvals = approvals
        self._autosave = autosave
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self._queues: dict[str, SlotQueue] = {}
        self.finished: dict[str, int] = {}
        """How many executions have ended, by status."""
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
        """Those in which something is under way."""
        return {run.execution.session_id for run in self._runs.values()}

    def queue(self, session_id: str, capacity: int) -> SlotQueue:
        """The session's line on this replica; who takes it gives it to `forget` in the end."""
        queue = self._queues.get(session_id)
        if queue is None:
            queue = self._queues[session_id] = SlotQueue(capacity)
        return queue

    def forget(self, session_id: str, queue: SlotQueue) -> None:
        """Drop a queue that nobody is in, and no other: a new one may have taken its place."""
        if not queue.busy and not queue.coming and self._queues.get(session_id) is queue:
            del self._queues[session_id]

    def start(self, execution: Execution, capacity: int, *, adopted: bool = False) -> Run:
        """See a recorded execution through; with `adopted`, one that may have begun already."""
        run = self._runs[execution.id] = Run(execution)
        run.on_question = lambda line: self._approvals.hear(run, line)
        run.adopted = run.may_have_begun = adopted
        run.losses = self._leases.losses
        # Before the first await: the order of the turns is that of the calls.
        queue = run.queue = self.queue(execution.session_id, capacity)
        run.turn = queue.join(run.changed.set)
        run.task = self._background.start(self._run(run, queue, run.turn), f"run {execution.id}")
        return run

    async def adopt(self, execution: Execution) -> None:
        """Take over an execution whose holder is lost; nothing happens if somebody else did."""
        if execution.id in self._runs:
            return
        capacity = await self.capacity_here(execution.session_id)
        if capacity is None:
            return
        try:
            execution = await self._store.executions.save(
                dataclasses.replace(execution, holder=self._leases.replica)
            )
        except Conflict:
            return
        log.info("execution.adopted", execution_id=execution.id)
        self.start(execution, capacity, adopted=True)
        # Not before: it is seen to whatever this raises, and one that comes now is heard.
        if await self._coordination.cancelled(execution.id) is not None:
            self.cancellation_requested(execution.id)

    async def capacity_here(self, session_id: str) -> int | None:
        """
        How many may run in a session at once; none when it is on a node that this replica does not
        reach.
        """
        session = await self._store.sessions.get(session_id)
        if session is None:
            return 1
        return session.capacity if session.runtime_node == self._node_id else None

    async def revoke_later(self, execution_id: str) -> None:
        """
        After a record whose fate is not known: who submitted it was told that it failed, so when
        the store is back it must not be there to run.
        """
        stored = await self._completions.stored(execution_id)
        if stored is not None and not stored.status.ended:
            await self.revoke(stored)

    async def revoke(self, execution: Execution) -> None:
        """Record that an execution was never accepted, and so did not run."""
        words = "The database did not answer in time when it was submitted; it was not run."
        outcome = lost(ExecutionStatus.CRASHED, Cause.DRIVER, words, stdout=b"", stderr=b"")
        with contextlib.suppress(Superseded):
            await self._finish(Run(execution), outcome)

    def stand_in(self, execution: Execution) -> Run:
        """An execution that another replica sees to, as one here: its end can be waited for."""
        run = Run(execution)
        if execution.status.ended:
            run.finish(execution)
        else:
            run.task = self._background.start(
                self._await_other(run), f"await {execution.id}", waits=True
            )
        return run

    def detach(self) -> None:
        """Follow nothing any more: what runs goes on, and is found again by another replica."""
        for run in self._runs.values():
            if run.task is not None and run.ended_by is None:
                run.task.cancel()

    # To another node

    def under_way(self, session_id: str) -> list[asyncio.Future[Execution]]:
        """The ends of what this replica sees to in a session."""
        return [run.done for run in self._of(session_id)]

    def _of(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.execution.session_id == session_id]

    async def let_go_of(self, session_id: str) -> list[Run]:
        """
        Follow what is under way in a session no more, because it leaves this node; to be given to
        `hand_over` when it has.
        """
        found = [run for run in self._of(session_id) if not run.done.done()]
        tasks = [run.task for run in found if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        left = [run for run in found if not run.done.done()]
        for run in left:
            # It is this replica's as long as its record says so.
            self._runs[run.execution.id] = run
        return left

    async def hand_over(self, left: Sequence[Run]) -> None:
        """Leave these to whoever reaches their session; who waits for them here goes on to."""
        for run in left:
            await self.release(run.execution.id)
            if self._runs.get(run.execution.id) is run:
                del self._runs[run.execution.id]
            self._give_up(run)
        if left:
            with contextlib.suppress(TemporaryError):
                await self._coordination.notify(REPLICA_LEFT)

    async def release(self, execution_id: str) -> None:
        """Record that nobody sees to an execution of ours, however long the store is away."""
        backoff = Backoff()
        while True:
            stored = await self._completions.stored(execution_id)
            if stored is None or stored.status.ended or not self._is_ours(stored):
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

    # From outside

    async def cancel(self, run: Run, reason: str | None = None) -> None:
        """End an execution: asked first, then made to."""
        if not run.cancelled:
            run.reason = reason
        self._stop(run)
        connection = self._sessions.connections.reachable(run.execution.session_id)
        # Not begun: `_run` sees the mark. Or just over: then its result stands.
        if connection is not None:
            with contextlib.suppress(ExecutorError, LinkLost):
                grace = self._settings.cancel_grace.total_seconds()
                await connection.link.call("cancel", id=run.execution.id, grace=grace)

    def _stop(self, run: Run) -> None:
        run.cancelled = True
        run.give_up_turn()

    def cancellation_requested(self, execution_id: str) -> None:
        run = self._runs.get(execution_id)
        if run is not None:
            self._background.start(self._cancel_as_asked(run), f"cancel {execution_id}")

    async def _cancel_as_asked(self, run: Run) -> None:
        reason = None
        with contextlib.suppress(TemporaryError):
            reason = await self._coordination.cancelled(run.execution.id)
        await self.cancel(run, reason or None)

    def coordination_restored(self) -> None:
        self._background.start(self._look_for_cancels(), "look for cancellations")

    async def _look_for_cancels(self) -> None:
        for execution_id in list(self._runs):
            if await self._coordination.cancelled(execution_id) is not None:
                self.cancellation_requested(execution_id)

    def session_stopping(self, session: Session) -> None:
        self._end_runs(session)

    def session_ended(self, session: Session) -> None:
        self._end_runs(session)

    def _end_runs(self, session: Session) -> None:
        for run in self._runs.values():
            if run.execution.session_id == session.id and _is_cut_short(run.execution, session):
                run.ended_by = session
                run.give_up_turn()

    def session_connected(self, connection: Connection) -> None:
        if connection.link.hello["runs"]:
            work = self._settle_journal(connection)
            self._background.start(work, f"settle journal of {connection.instance.id}")

    async def _settle_journal(self, connection: Connection) -> None:
        """Acknowledge what is stored, and was not acknowledged before the link went."""
        for run in connection.link.hello["runs"]:
            stored = await self._store.executions.get(run["id"])
            if run["ended"] and (stored is None or stored.status.ended):
                connection.link.acknowledge(run["id"])

    # To the end

    async def _run(self, run: Run, queue: SlotQueue, turn: asyncio.Future[bool]) -> None:
        try:
            backoff = Backoff()
            tries = 0
            while not run.done.done():
                try:
                    if run.may_have_begun:
                        await self._resume(run)
                        continue
                    await turn
                    await self._try(run, queue, turn)
                    tries += 1
                    if tries > QUICK_TRIES and not run.done.done():
                        # A hostile image can refuse for ever, and is not to keep this busy.
                        await backoff.pause()
                except LeaseLost:
                    # Nobody has sent it but this one, as long as it is this one's.
                    run.may_have_begun |= run.execution.started_at is not None
                    if not await self._still_ours(run):
                        self._give_up(run)
                        return
                except StaleRecord:
                    if not await self._caught_up(run):
                        self._give_up(run)
                        return
                    run.may_have_begun |= run.execution.started_at is not None
                    await backoff.pause()
                except Superseded:
                    self._give_up(run)
                    return
                except Elsewhere:
                    await self.hand_over([run])
                    return
                except BackendUnavailable as error:
                    # Sent to an instance before: it may have begun there, and does so once.
                    run.may_have_begun |= run.execution.started_at is not None
                    log.warning(
                        "execution.waits", execution_id=run.execution.id, error=error.message
                    )
                    await backoff.pause()
        finally:
            queue.leave(turn)
            self.forget(run.execution.session_id, queue)
            self._runs.pop(run.execution.id, None)

    def _give_up(self, run: Run) -> None:
        """Another replica has it; those who wait for it here are told what comes of it there."""
        execution_id = run.execution.id
        log.info("execution.superseded", execution_id=execution_id)
        run.task = self._background.start(
            self._await_other(run), f"await {execution_id}", waits=True
        )

    async def _try(self, run: Run, queue: SlotQueue, turn: asyncio.Future[bool]) -> None:
        if run.stopped:
            await self._finish(run, cut_short(run))
            await self._completions.tell(run.execution.id)
            return
        execution = run.execution
        lost = None
        place, *others = _places(execution.session_id, queue.slot(turn), queue.capacity)
        lease = self._leases.lease(place, execution.id, alternatives=others)
        run.in_line = True
        try:
            async with lease:
                run.in_line = False
                outcome = await self._attempts.run(run, lease)
                if outcome is not None and self._is_retried(run, outcome):
                    lost = outcome
                elif outcome is not None:
                    await self._finish(run, outcome)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Any other cancellation goes on.
            if not run.called_out or task is None or task.uncancel() > 0:
                raise
            run.called_out = False
        finally:
            run.in_line = False
        if lost is not None:
            await self._again(run, lost)
        if run.done.done():
            await self._completions.tell(execution.id)

    async def _resume(self, run: Run) -> None:
        """
        See to an execution that may have begun before: to its end if the executor has it. That
        takes neither a turn nor a lease, as nothing new is started; two who do it are told apart by
        the record's version.
        """
        outcome = await self._attempts.resume(run)
        if outcome is None:
            run.may_have_begun = False
        elif self._is_retried(run, outcome):
            await self._again(run, outcome)
        else:
            await self._finish(run, outcome)
            await self._completions.tell(run.execution.id)

    def _is_retried(self, run: Run, outcome: Outcome) -> bool:
        return not run.stopped and retry.is_retried(run.execution, outcome, self._settings.retries)

    async def _again(self, run: Run, outcome: Outcome) -> None:
        """Record that the attempt is lost, tell, and pause before the next one."""
        execution = run.execution
        following = execution.retried(outcome, at=self._clock.now(), node_id=self._node_id)
        try:
            event = execution_event(following, "retried", self._clock.now())
            following = await self._store.executions.save(following, event=event)
        except Conflict:
            raise StaleRecord from None
        pause = retry.delay(
            following.retry_count,
            first=self._settings.retry_backoff,
            most=self._settings.retry_max_backoff,
        ).total_seconds()
        message = None if outcome.error is None else outcome.error.get("message")
        log.warning(
            "execution.retried",
            execution_id=execution.id,
            cause=outcome.cause,
            retry=following.retry_count,
            pause=pause,
        )
        run.may_have_begun = False
        self._approvals.forget(run)
        run.next_attempt(following, cause=outcome.cause, message=message, delay=pause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await run.stopping.wait()

    async def _finish(self, run: Run, outcome: Outcome) -> None:
        """Store the result, then tell: not before, however long the store is away."""
        connection = self._sessions.connections.reachable(run.execution.session_id)
        if connection is not None:
            await self._autosave.before_result(connection)
        outcome = run.with_log(outcome)
        execution = run.execution.ended(outcome, at=self._clock.now(), node_id=self._node_id)
        event = execution_event(execution, execution.status, self._clock.now())
        backoff = Backoff()
        while True:
            try:
                away = await self._offload.put_away(execution)
                stored = await self._store.executions.save(away, event=event)
                if away is execution:
                    execution = stored
                else:
                    version, kept = stored.version, stored.kept
                    execution = dataclasses.replace(execution, version=version, kept=kept)
                break
            except TemporaryError as error:
                log.warning("execution.not_stored", execution_id=execution.id, error=error.message)
                await backoff.pause()
            except Conflict:
                # Somebody else stored a result first, and that one counts; or sees to it now.
                found = await self._completions.stored(execution.id)
                if found is None or not found.status.ended:
                    seen_to = self._runs.get(execution.id) is run
                    if found is None or not seen_to or not self._is_ours(found):
                        raise Superseded from None
                    # Written by this very one, though the store did not say so.
                    execution = dataclasses.replace(execution, version=found.version)
                    continue
                execution = await self._offload.fetch(found)
                run.complete(execution)
                break
        connection = self._sessions.connections.reachable(execution.session_id)
        if connection is not None:
            connection.link.acknowledge(execution.id)
        self.finished[execution.status] = self.finished.get(execution.status, 0) + 1
        self.seconds += outcome.execution_time
        run.finish(execution)
        self._approvals.forget(run)

    # Seen to by others

    async def _still_ours(self, run: Run) -> bool:
        """After a lease was lost: the record tells whose the execution is."""
        stored = await self._completions.stored(run.execution.id)
        return stored is not None and not stored.status.ended and self._is_ours(stored)

    async def _caught_up(self, run: Run) -> bool:
        """
        Take the version of the record, if it is this replica's: a write whose answer was lost is
        repeated then. False when another replica owns the execution, or it has ended.
        """
        execution = run.execution
        stored = await self._completions.stored(execution.id)
        if (
            stored is None
            or stored.status.ended
            or not self._is_ours(stored)
            or self._runs.get(execution.id) is not run
        ):
            return False
        run.execution = dataclasses.replace(execution, version=stored.version)
        return True

    def _is_ours(self, stored: Execution) -> bool:
        return stored.holder == self._leases.replica

    async def _await_other(self, run: Run) -> None:
        ended = await self._completions.end_of(run.execution)
        run.complete(ended)
        run.finish(ended)


def _is_cut_short(execution: Execution, session: Session) -> bool:
    """Whether the end or the rest of its session is that of the execution."""
    rested = session.rested_at
    if session.status.ended or rested is None:
        return True
    if session.cause is Cause.IDLE and execution.started_at is None:
        return False  # It came when nobody seemed to need the session, and starts it again.
    # What was asked for after it was stopped does so too.
    return execution.created_at <= rested


def _places(session_id: str, slot: int, capacity: int) -> list[str]:
    """The session's places by name, this one first: other replicas may be in any of them."""
    slots = [(slot + further) % capacity for further in range(capacity)]
    return [session_id if number == 0 else f"{session_id}#{number}" for number in slots]
