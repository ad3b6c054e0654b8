"""
Executions under way on this replica, each seen through to its end.

One at a time in a session: a turn in the line of this replica, then the session's lease, which
stands in line with other replicas. Under the lease the executor is told to run it; it refuses while
another runs, which a replica that was lost may have left. One that may have begun before (under a
lost replica, or a lost lease) is asked for first. An executor runs an id once, so asking again is
safe as long as the instance lives.

The result is stored by compare-and-set before anybody is told, and acknowledged to the executor
only then: a replica that dies in between leaves it in the executor's journal, for the next one. A
replica that lost the execution to another is refused by its version and waits for that one's
result. While the store is away the code goes on and the result waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError, Conflict, NotFound, PermanentError, TemporaryError
from atoll.link.client import ExecutorError, LinkLost, parse_value
from atoll.model.execution import Execution, ExecutionStatus, Outcome
from atoll.model.instance import State
from atoll.model.outcome import conclude, lost
from atoll.model.session import Cause, Session, SessionStatus
from atoll.service.leases import LeaseLost
from atoll.service.running import Queue, Running

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination, Heard
    from atoll.drivers.base import Driver
    from atoll.service.bulk import Bulk
    from atoll.service.leases import Lease, Leases
    from atoll.service.sessions import Live, Sessions
    from atoll.service.tasks import Tasks
    from atoll.settings import Settings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

CANCEL_GRACE = 2.0
END_MARGIN = 30.0
"""Seconds beyond its time-out after which an execution that was not ended is given up."""
REATTACH_SECONDS = 0.5
BACKOFF = (1.0, 2.0, 4.0, 10.0)
LOOK_SECONDS = 5.0
"""A message that tells of an end may be lost; so the record is looked at this often as well."""
AWAY = frozenset(
    {"database_unavailable", "coordination_unavailable", "blobs_unavailable", "lease_lost"}
)
"""Codes of what passes, a back-end that is away above all: what was accepted waits for it."""


class _Superseded(Exception):
    """Another replica sees to it now."""


class _Deaf:
    """Hears a run only to know when it ends."""

    def started(self) -> None: ...
    def output(self, sequence: int, channel: int, data: bytes) -> None: ...


class Runs:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        sessions: Sessions,
        bulk: Bulk,
        coordination: Coordination,
        leases: Leases,
        tasks: Tasks,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._store = store
        self._driver = driver
        self._sessions = sessions
        self._bulk = bulk
        self._coordination = coordination
        self._leases = leases
        self._tasks = tasks
        self._clock = clock
        self._settings = settings
        self._running: dict[str, Running] = {}
        self._queues: dict[str, Queue] = {}
        self.finished: dict[str, int] = {}
        """How many executions have ended, by status."""
        self.seconds = 0.0
        """How long they took together."""
        sessions.ended = self._session_ended
        sessions.reconnected = self._reconnected
        coordination.on_cancel = self._cancel_heard
        coordination.on_gap = self._cancels_missed

    # What is under way

    def get(self, execution_id: str) -> Running | None:
        return self._running.get(execution_id)

    @property
    def count(self) -> int:
        return len(self._running)

    def queue(self, session_id: str) -> Queue:
        """The session's line on this replica; who takes it gives it to `forget` in the end."""
        return self._queues.setdefault(session_id, Queue())

    def forget(self, session_id: str, queue: Queue) -> None:
        """Drop a queue that nobody is in, and no other: a new one may have taken its place."""
        if not queue.busy and not queue.coming and self._queues.get(session_id) is queue:
            del self._queues[session_id]

    def start(self, execution: Execution, *, adopted: bool = False) -> Running:
        """See a recorded execution through; with `adopted`, one that may have begun already."""
        running = self._running[execution.id] = Running(execution)
        running.adopted = running.may_have_begun = adopted
        running.losses = self._leases.losses
        # Before the first await: the order of the turns is that of the calls.
        queue = self.queue(execution.session_id)
        running.turn = queue.join()
        running.task = self._tasks.start(
            self._run(running, queue, running.turn), f"run {execution.id}"
        )
        return running

    async def adopt(self, execution: Execution) -> None:
        """Take over an execution whose holder is lost; nothing happens if somebody else did."""
        if execution.id in self._running or not await self._sessions.here(execution.session_id):
            return
        try:
            execution = await self._store.executions.save(
                dataclasses.replace(execution, holder=self._leases.replica)
            )
        except Conflict:
            return
        log.info("execution.adopted", execution_id=execution.id)
        self.start(execution, adopted=True)
        # Not before: it is seen to whatever this raises, and one that comes now is heard.
        if await self._coordination.cancelled(execution.id) is not None:
            self._cancel_heard(execution.id)

    async def revoke_later(self, execution_id: str) -> None:
        """
        After a record whose fate is not known: who submitted it was told that it failed, so when
        the store is back it must not be there to run.
        """
        stored = await self._stored(execution_id)
        if stored is not None and not stored.status.ended:
            await self.revoke(stored)

    async def revoke(self, execution: Execution) -> None:
        """Record that an execution was never accepted, and so did not run."""
        words = "The database did not answer in time when it was submitted; it was not run."
        outcome = lost(ExecutionStatus.CRASHED, Cause.DRIVER, words, stdout=b"", stderr=b"")
        with contextlib.suppress(_Superseded):
            await self._finish(Running(execution), outcome)

    def stand_in(self, execution: Execution) -> Running:
        """An execution that another replica sees to, as one here: its end can be waited for."""
        running = Running(execution)
        if execution.status.ended:
            running.finish(execution)
        else:
            running.task = self._tasks.start(
                self._await_other(running), f"await {execution.id}", waits=True
            )
        return running

    def let_go(self) -> None:
        """Follow nothing any more: what runs goes on, and is found again by another replica."""
        for running in self._running.values():
            if running.task is not None and running.ended_by is None:
                running.task.cancel()

    # From outside

    async def cancel(self, running: Running) -> None:
        """End an execution: asked first, then made to."""
        self._stop(running)
        live = self._sessions.reachable(running.execution.session_id)
        # Not begun: `_run` sees the mark. Or just over: then its result stands.
        if live is not None:
            with contextlib.suppress(ExecutorError, LinkLost):
                await live.link.call("cancel", id=running.execution.id, grace=CANCEL_GRACE)

    def _stop(self, running: Running) -> None:
        running.cancelled = True
        running.give_up_turn()

    def _cancel_heard(self, execution_id: str) -> None:
        running = self._running.get(execution_id)
        if running is not None:
            self._tasks.start(self.cancel(running), f"cancel {execution_id}")

    def _cancels_missed(self) -> None:
        self._leases.gap()
        self._tasks.start(self._look_for_cancels(), "look for cancellations")

    async def _look_for_cancels(self) -> None:
        for execution_id in list(self._running):
            if await self._coordination.cancelled(execution_id) is not None:
                self._cancel_heard(execution_id)

    def _session_ended(self, session: Session) -> None:
        for running in self._running.values():
            if running.execution.session_id == session.id:
                running.ended_by = session
                running.give_up_turn()

    def _reconnected(self, live: Live) -> None:
        if live.link.hello.get("runs"):
            work = self._settle_journal(live)
            self._tasks.start(work, f"settle journal of {live.instance.id}")

    async def _settle_journal(self, live: Live) -> None:
        """Acknowledge what is stored, and was not acknowledged before the link went."""
        for run in live.link.hello["runs"]:
            stored = await self._store.executions.get(run["id"])
            if run["ended"] and (stored is None or stored.status.ended):
                live.link.acknowledge(run["id"])

    # To the end

    async def _run(self, running: Running, queue: Queue, turn: asyncio.Future[bool]) -> None:
        try:
            attempt = 0
            while not running.done.done():
                try:
                    if running.may_have_begun:
                        await self._resume(running)
                        continue
                    await turn
                    await self._try(running)
                except LeaseLost:
                    # Nobody has sent it but this one, as long as it is this one's.
                    running.may_have_begun |= running.execution.started_at is not None
                    if not await self._still_ours(running):
                        self._give_up(running)
                        return
                except _Superseded:
                    self._give_up(running)
                    return
                except TemporaryError as error:
                    if error.code not in AWAY:
                        raise
                    # Sent to an instance before: it may have begun there, and does so once.
                    running.may_have_begun |= running.execution.started_at is not None
                    pause = BACKOFF[min(attempt, len(BACKOFF) - 1)]
                    attempt += 1
                    log.warning(
                        "execution.waits", execution_id=running.execution.id, error=error.message
                    )
                    await asyncio.sleep(pause)
        finally:
            queue.leave(turn)
            self.forget(running.execution.session_id, queue)
            self._running.pop(running.execution.id, None)

    def _give_up(self, running: Running) -> None:
        """Another replica has it; those who wait for it here are told what comes of it there."""
        execution_id = running.execution.id
        log.info("execution.superseded", execution_id=execution_id)
        running.task = self._tasks.start(
            self._await_other(running), f"await {execution_id}", waits=True
        )

    async def _try(self, running: Running) -> None:
        if running.stopped:
            await self._finish(running, self._cut_short(running))
            await self._tell(running.execution.id)
            return
        execution = running.execution
        lease = self._leases.lease(execution.session_id, execution.id)
        running.in_line = True
        try:
            async with lease:
                running.in_line = False
                outcome = await self._outcome_of(running, self._outcome(running, lease))
                if outcome is not None:
                    await self._finish(running, outcome)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Any other cancellation goes on.
            if not running.called_out or task is None or task.uncancel() > 0:
                raise
            running.called_out = False
        finally:
            running.in_line = False
        if running.done.done():
            await self._tell(execution.id)

    async def _resume(self, running: Running) -> None:
        """
        See to an execution that may have begun before: to its end if the executor has it. That
        takes neither a turn nor a lease, as nothing new is started; two who do it are told apart by
        the record's version.
        """
        outcome = await self._outcome_of(running, self._found_again(running))
        if outcome is None:
            running.may_have_begun = False
        else:
            await self._finish(running, outcome)
            await self._tell(running.execution.id)

    async def _tell(self, execution_id: str) -> None:
        try:
            await self._coordination.tell(f"ended:{execution_id}")
        except TemporaryError as error:
            # Who waits for it elsewhere looks now and then as well.
            log.info("execution.not_told", execution_id=execution_id, error=error.message)

    async def _outcome_of(
        self, running: Running, work: Awaitable[Outcome | None]
    ) -> Outcome | None:
        try:
            return await work
        except (LeaseLost, _Superseded):
            raise
        except Exception as error:  # Whatever it is, an execution has an end.
            if isinstance(error, TemporaryError) and error.code in AWAY:
                raise
            log.error("execution.broke", execution_id=running.execution.id, exc_info=error)
            words = "Something broke in the server; it is in its log."
            return lost(ExecutionStatus.CRASHED, Cause.DRIVER, words, stdout=b"", stderr=b"")

    async def _outcome(self, running: Running, lease: Lease) -> Outcome | None:
        """What came of running it; None when another still ran, and it is to be tried again."""
        if running.stopped:
            return self._cut_short(running)
        execution = running.execution
        try:
            live = await self._sessions.live(execution.session_id)
        except AtollError as error:
            return await self._unreachable(running, error)
        # What the kernel ended for memory before this one is not this one's.
        await self._driver.out_of_memory(live.instance.handle)
        if running.adopted:
            # From the record, which may have only the beginning of it.
            try:
                request = await self._bulk.request_of(execution)
            except PermanentError as error:
                return lost(
                    ExecutionStatus.CRASHED, Cause.DRIVER, error.message, stdout=b"", stderr=b""
                )
            execution = dataclasses.replace(execution, request=request)
        if running.stopped:
            return self._cut_short(running)
        running.execution = execution = dataclasses.replace(
            execution, instance_id=live.instance.id, started_at=self._clock.now()
        )
        job = self._job(live, execution)
        # The last moment: what is sent now may not be sent by a replica that was given up.
        lease.check()
        if running.losses < self._leases.losses:
            # While it waited others took this replica for lost, and may have taken it over.
            running.losses = self._leases.losses
            raise LeaseLost(f"Execution {execution.id} may be another replica's.")
        try:
            async with asyncio.timeout(execution.request.timeout + END_MARGIN):
                raw = await live.link.run(job, running)
        except TimeoutError:
            # It ends executions itself; one that does not is of no more use.
            live.link.close()
            return await self._after_loss(running, live)
        except LinkLost:
            return await self._after_loss(running, live)
        except ExecutorError as error:
            if error.code == "run_is_over":
                raise _Superseded from error
            if error.code == "busy":
                running.execution = dataclasses.replace(execution, started_at=None)
                if not running.stopped:
                    running.in_line = True
                    await self._let_end(live, str(error.message))
                return None
            return lost(
                ExecutionStatus.CRASHED, Cause.DRIVER, error.message, stdout=b"", stderr=b""
            )
        return await self._conclude(running, live, raw)

    async def _let_end(self, live: Live, execution_id: str) -> None:
        """Wait for a run that a lost replica left in the session; who adopts it stores it."""
        log.info("session.busy", session_id=live.session.id, execution_id=execution_id)
        with contextlib.suppress(ExecutorError, LinkLost):
            await live.link.attach(execution_id, 0, _Deaf())

    async def _unreachable(self, running: Running, error: AtollError) -> Outcome:
        """The session has no instance to run it in."""
        if error.code in AWAY:
            raise error
        if error.code == "session_ended":
            running.ended_by = await self._sessions.get(running.execution.session_id)
        if running.stopped:
            return self._cut_short(running)
        return lost(
            ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, error.message, stdout=b"", stderr=b""
        )

    async def _found_again(self, running: Running) -> Outcome | None:
        """
        The outcome of an execution that may have begun before; None when it certainly has not.

        An executor forgets a run only when its result is stored. So one that does not know it, and
        was the session's when the execution was submitted, has never had it.
        """
        execution = running.execution
        try:
            live = await self._sessions.reach(execution.session_id)
        except AtollError as error:
            return await self._unreachable(running, error)
        if live is None:
            return self._not_found(running)
        if running.cancelled:
            with contextlib.suppress(ExecutorError, LinkLost):
                await live.link.call("cancel", id=execution.id, grace=CANCEL_GRACE)
        if execution.started_at is None:
            running.execution = dataclasses.replace(
                execution, instance_id=live.instance.id, started_at=self._clock.now()
            )
        try:
            raw = await live.link.attach(execution.id, running.sequence, running)
        except LinkLost:
            return await self._after_loss(running, live)
        except ExecutorError:
            running.execution = execution
            if live.instance.id != execution.instance_id:
                return self._not_found(running)
            return None
        return await self._conclude(running, live, raw)

    def _not_found(self, running: Running) -> Outcome:
        return lost(
            ExecutionStatus.CRASHED,
            Cause.INSTANCE_LOST,
            "The instance that it may have begun in is gone.",
            stdout=running.gathered("stdout"),
            stderr=running.gathered("stderr"),
        )

    async def _after_loss(self, running: Running, live: Live) -> Outcome:
        """The link went: attach again if the instance is there, and say so if it is not."""
        execution = running.execution
        deadline = self._clock.monotonic() + execution.request.timeout + END_MARGIN
        while not await self._session_has_ended(running) and (
            (await self._driver.observe(live.instance.handle)).state is State.RUNNING
        ):
            try:
                again = await self._sessions.live(execution.session_id)
                if running.cancelled:
                    # What was asked for may have gone with the link.
                    await again.link.call("cancel", id=execution.id, grace=CANCEL_GRACE)
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    raw = await again.link.attach(execution.id, running.sequence, running)
                return await self._conclude(running, again, raw)
            except ExecutorError:
                break  # It does not know the run: it never had it.
            except (AtollError, TimeoutError) as error:
                if self._clock.monotonic() >= deadline:
                    break
                log.info("execution.reattach", execution_id=execution.id, error=str(error))
                await asyncio.sleep(REATTACH_SECONDS)
        if running.ended_by is not None:
            return self._cut_short(running)
        cause = Cause.OOM if await self._driver.out_of_memory(live.instance.handle) else None
        return lost(
            ExecutionStatus.CRASHED,
            cause or Cause.INSTANCE_LOST,
            "The instance ended while the execution ran.",
            stdout=running.gathered("stdout"),
            stderr=running.gathered("stderr"),
        )

    async def _session_has_ended(self, running: Running) -> bool:
        """By this replica, which says so, or by another, which only the record tells."""
        if running.ended_by is None:
            session = await self._sessions.get(running.execution.session_id)
            if session.status.ended:
                running.ended_by = session
        return running.ended_by is not None

    def _cut_short(self, running: Running) -> Outcome:
        session = running.ended_by
        expired = session is not None and session.status is SessionStatus.TIMEOUT
        cause = (session.cause if session is not None else None) or Cause.USER
        words = "The execution was cancelled." if session is None else "The session ended."
        return lost(
            ExecutionStatus.TIMEOUT if expired else ExecutionStatus.CANCELLED,
            cause,
            words,
            code="cancelled" if session is None else None,
            stdout=running.gathered("stdout"),
            stderr=running.gathered("stderr"),
        )

    def _job(self, live: Live, execution: Execution) -> dict[str, Any]:
        request, session, settings = execution.request, live.session, self._settings.execution
        limits, watch = self._driver.run_limits(session.resources)
        return {
            "id": execution.id,
            "kind": "command" if request.command is not None else request.language,
            "code": request.code,
            "command": request.command,
            "event": request.event,
            "stdin": request.stdin,
            "args": request.args,
            "env": {**session.env_vars, **request.env},
            "cwd": _inside(request.cwd),
            "timeout": request.timeout,
            "output_limit": settings.output_limit,
            "return_limit": settings.return_limit,
            "artifact_limit": settings.artifact_limit,
            "limits": limits,
            "watch": watch,
            "alone": True,
        }

    async def _conclude(self, running: Running, live: Live, raw: dict[str, Any]) -> Outcome:
        running.started()
        value, error = parse_value(bytes(running.value), self._settings.execution.return_limit)
        failed = raw.get("exit_code") != 0 and raw.get("reason") is None
        return conclude(
            raw,
            stdout=running.gathered("stdout"),
            stderr=running.gathered("stderr"),
            return_json=value,
            error=error,
            out_of_memory=failed and await self._driver.out_of_memory(live.instance.handle),
        )

    async def _finish(self, running: Running, outcome: Outcome) -> None:
        """Store the result, then tell: not before, however long the store is away."""
        execution = dataclasses.replace(
            running.execution,
            status=outcome.status,
            outcome=outcome,
            completed_at=self._clock.now(),
        )
        attempt = 0
        while True:
            try:
                stored = await self._store.executions.save(await self._bulk.put_away(execution))
                execution = dataclasses.replace(execution, version=stored.version, kept=stored.kept)
                break
            except TemporaryError as error:
                pause = BACKOFF[min(attempt, len(BACKOFF) - 1)]
                attempt += 1
                log.warning("execution.not_stored", execution_id=execution.id, error=error.message)
                await asyncio.sleep(pause)
            except Conflict:
                # Somebody else stored a result first, and that one counts; or sees to it now.
                found = await self._stored(execution.id)
                if found is None or not found.status.ended:
                    raise _Superseded from None
                execution = await self._bulk.fetch(found)
                running.complete(execution)
                break
        live = self._sessions.reachable(execution.session_id)
        if live is not None:
            live.link.acknowledge(execution.id)
        self.finished[execution.status] = self.finished.get(execution.status, 0) + 1
        self.seconds += outcome.execution_time
        running.finish(execution)

    # Seen to by others

    async def _still_ours(self, running: Running) -> bool:
        """After a lease was lost: the record tells whose the execution is."""
        stored = await self._stored(running.execution.id)
        return (
            stored is not None and stored.holder == self._leases.replica and not stored.status.ended
        )

    async def _stored(self, execution_id: str) -> Execution | None:
        """The record, however long the store is away."""
        attempt = 0
        while True:
            try:
                return await self._store.executions.get(execution_id)
            except TemporaryError as error:
                pause = BACKOFF[min(attempt, len(BACKOFF) - 1)]
                attempt += 1
                log.info("execution.waits", execution_id=execution_id, error=error.message)
                await asyncio.sleep(pause)

    async def _await_other(self, running: Running) -> None:
        ended = await self.end_of(running.execution)
        running.complete(ended)
        running.finish(ended)

    async def end_of(self, execution: Execution) -> Execution:
        """The record of an execution that another replica sees to, when it has ended."""
        while not execution.status.ended:
            try:
                found = await self.ended_elsewhere(execution.id, LOOK_SECONDS * 12)
            except TemporaryError as error:
                log.info("execution.waits", execution_id=execution.id, error=error.message)
                continue
            if found is None:
                raise NotFound(f"Execution {execution.id} is gone.", code="execution_not_found")
            execution = found
        return await self._bulk.fetch(execution)

    async def ended_elsewhere(self, execution_id: str, seconds: float) -> Execution | None:
        """The record when another replica has ended it, or as it is after so many seconds."""
        deadline = self._clock.monotonic() + seconds
        while True:
            try:
                async with self._coordination.listen(f"ended:{execution_id}") as heard:
                    return await self._told_of_end(execution_id, heard, deadline)
            except TemporaryError as error:
                if error.code != "coordination_unavailable":
                    raise
            # Nobody can tell of it. The pause comes first: to fail may take no time at all.
            left = deadline - self._clock.monotonic()
            await asyncio.sleep(max(0.0, min(left, BACKOFF[0])))
            execution = await self._store.executions.get(execution_id)
            if execution is None or execution.status.ended or left <= BACKOFF[0]:
                return execution

    async def _told_of_end(
        self, execution_id: str, heard: Heard, deadline: float
    ) -> Execution | None:
        while True:
            left = deadline - self._clock.monotonic()
            try:
                execution = await self._store.executions.get(execution_id)
                if execution is None or execution.status.ended or left <= 0:
                    return execution
            except TemporaryError:
                if left <= 0:
                    raise
            await heard.wait(min(left, LOOK_SECONDS))


def _inside(cwd: str | None) -> str:
    """The working directory: beneath the workspace unless it is absolute."""
    if cwd is None:
        return "/workspace"
    return cwd if cwd.startswith("/") else f"/workspace/{cwd}"
