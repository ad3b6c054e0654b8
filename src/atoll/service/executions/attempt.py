"""
One attempt at an execution: told to the executor, or found there again, and what came of it.

The executor is told how many may run at once, and refuses more: a replica that was lost may have
left one in the session. It runs an id once, so asking again is safe as long as the instance lives.
Whatever happens an attempt has an outcome, unless a back-end is away or the lease was lost: then it
is raised, and there will be another attempt.

The executor ends a run at its time-out. One that does not, because user code keeps it from working
or because the image brought another program in its place, is not waited for: a little later the
instance is ended from outside, and the execution has timed out, which is not retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import (
    AtollError,
    BackendUnavailable,
    Conflict,
    LeaseLost,
    NodeUnreachable,
    PermanentError,
    SessionEnded,
    SessionNotRunning,
    TemporaryError,
)
from atoll.link.errors import (
    ContextUnavailable,
    ExecutorError,
    ExecutorLeaving,
    LinkLost,
    ProtocolViolation,
    RunOver,
    SessionOccupied,
    StaleSession,
)
from atoll.link.values import parse_value
from atoll.model.event import execution_event
from atoll.model.execution import Execution, ExecutionStatus, Outcome
from atoll.model.instance import State
from atoll.model.outcome import conclude, lost, timed_out
from atoll.model.session import Cause, SessionStatus
from atoll.service.executions.run import MAX_ARTIFACTS, MAX_RESULTS_SIZE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from atoll.coordination.leases import Lease
    from atoll.drivers.base import Driver
    from atoll.link.messages import RunResult
    from atoll.model.session import Session
    from atoll.service.executions.offload import Offload
    from atoll.service.executions.run import Run
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

OVERDUE_SECONDS = 10.0
"""How long after its time-out a run whose result has not come is ended with its instance."""
LAST_LOOK_SECONDS = 3.0
"""For the result of such a run: it may have waited for this process, or for a lost link."""
JOURNAL_SECONDS = 30.0
"""The longest that an executor may take to send a result that it has from an earlier one."""
REATTACH_SECONDS = 0.5
LASTING_SECONDS = 1.0
LEAVING_SECONDS = 10.0
"""The longest that an executor takes to end when it was told to."""


class Superseded(Exception):
    """Another replica sees to it now."""


class StaleRecord(Superseded):
    """The record has changed since it was read or written here, maybe by this replica itself."""


class Elsewhere(Exception):
    """Its session is on another node now, where somebody sees to it."""


class Attempts:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        sessions: SessionAccess,
        offload: Offload,
        provisioning: Provisioning,
        settings: Settings,
    ) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._driver = driver
        self._sessions = sessions
        self._offload = offload
        self._provisioning = provisioning
        self._settings = settings.execution
        self._grace = settings.execution.cancel_grace.total_seconds()
        self._heartbeat = settings.link.heartbeat.total_seconds()

    async def run(self, run: Run, lease: Lease) -> Outcome | None:
        """What came of running it; None when another still ran, and it is to be tried again."""
        return await self._settled(run, self._run(run, lease))

    async def resume(self, run: Run) -> Outcome | None:
        """
        The outcome of an execution that may have begun before; None when it certainly has not.

        An executor forgets a run only when its result is stored. So one that does not know it, and
        was the session's when the execution was submitted, has never had it.
        """
        return await self._settled(run, self._found_again(run))

    async def _settled(self, run: Run, work: Awaitable[Outcome | None]) -> Outcome | None:
        try:
            with self._noted(run):
                return await work
        except (LeaseLost, Superseded, Elsewhere):
            raise
        except ProtocolViolation as violation:
            # The same image would do the same again: there is no other attempt.
            return lost(
                ExecutionStatus.FAILED,
                Cause.PROTOCOL,
                violation.message,
                stdout=run.gathered("stdout"),
                stderr=run.gathered("stderr"),
            )
        except Exception as error:  # Whatever it is, an execution has an end.
            if isinstance(error, BackendUnavailable):
                raise
            log.error("execution.broke", execution_id=run.execution.id, exc_info=error)
            words = "Something broke in the server; it is in its log."
            return lost(ExecutionStatus.CRASHED, Cause.DRIVER, words, stdout=b"", stderr=b"")
        finally:
            if run.noting is not None:
                # Its version is the one that the end has to be written over.
                await asyncio.wait([run.noting])
                run.noting = None

    @contextlib.contextmanager
    def _noted(self, run: Run) -> Iterator[None]:
        """
        Record that it runs, if it lasts: other replicas, and lists by status, know only the record.
        One that ends soon has two commits and no more.
        """
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if run.execution.status is ExecutionStatus.RUNNING:
                run.noting = loop.create_task(self._note(run))
            else:
                timers[:] = [loop.call_later(LASTING_SECONDS, look)]

        timers.append(loop.call_later(LASTING_SECONDS, look))
        try:
            yield
        finally:
            timers[0].cancel()

    async def _note(self, run: Run) -> None:
        try:
            execution = run.execution
            stored = await self._store.executions.save(
                execution, event=execution_event(execution, "running", self._clock.now())
            )
        except (Conflict, TemporaryError) as error:
            # Whose it is, is told when its end is written.
            log.info("execution.not_noted", execution_id=run.execution.id, error=error.message)
        else:
            run.execution = dataclasses.replace(run.execution, version=stored.version)

    async def _run(self, run: Run, lease: Lease) -> Outcome | None:
        if run.stopped:
            return cut_short(run)
        execution = run.execution
        try:
            connection = await self._sessions.starter.connect(
                execution.session_id, submitted_at=execution.created_at
            )
        except AtollError as error:
            return await self._unreachable(run, error)
        if execution.instance_id is None:
            execution = run.execution = await self._placed(execution, connection)
        # What the kernel ended for memory before this one is not this one's.
        await self._driver.limits.out_of_memory(connection.instance.handle)
        if run.adopted:
            # From the record, which may have only the beginning of it.
            try:
                request = await self._offload.request_of(execution)
            except PermanentError as error:
                return lost(
                    ExecutionStatus.CRASHED, Cause.DRIVER, error.message, stdout=b"", stderr=b""
                )
            execution = dataclasses.replace(execution, request=request)
        if run.stopped:
            return cut_short(run)
        execution = dataclasses.replace(
            execution, instance_id=connection.instance.id, started_at=self._clock.now()
        )
        intake = run.bounded(self._settings, requested=True)
        try:
            await self._provisioning.prepare_variables(connection.session)
            job = self._job(connection, execution)
        except PermanentError as error:
            return _without(error)
        # The last moment: what is sent now may not be sent by a replica that was given up.
        lease.check()
        if run.losses < self._leases.losses:
            # While it waited others took this replica for lost, and may have taken it over.
            run.losses = self._leases.losses
            raise LeaseLost(f"Execution {execution.id} may be another replica's.")
        # Its version may be newer by now: that it runs is recorded beside this (`_note`).
        run.execution = dataclasses.replace(execution, version=run.execution.version)
        deadline = self._deadline(execution)
        try:
            async with self._until(deadline):
                raw = await connection.link.run(job, run, intake)
        except TimeoutError:
            return await self._end_overdue(run, connection)
        except ProtocolViolation:
            raise
        except LinkLost:
            return await self._after_loss(run, connection, deadline)
        except RunOver as error:
            raise Superseded from error
        except SessionOccupied as error:
            run.execution = dataclasses.replace(run.execution, started_at=None)
            if not run.stopped:
                run.in_line = True
                await self._let_end(connection, str(error.message))
            return None
        except ContextUnavailable as error:
            return _without(error)
        except StaleSession:
            # Not begun: the session has been changed since this replica read it.
            run.execution = dataclasses.replace(run.execution, started_at=None)
            await self._sessions.connections.refresh(connection)
            return None
        except ExecutorLeaving:
            # Not begun, and the instance goes: the one that takes its place runs it.
            run.execution = dataclasses.replace(run.execution, started_at=None)
            await asyncio.wait([connection.link.closed], timeout=LEAVING_SECONDS)
            return None
        except ExecutorError as error:
            return lost(
                ExecutionStatus.CRASHED, Cause.DRIVER, error.message, stdout=b"", stderr=b""
            )
        return await self._conclude(run, connection, raw)

    async def _placed(self, execution: Execution, connection: Connection) -> Execution:
        """
        Record where the next attempt begins: whoever takes it over can tell one that was lost with
        its instance from one that never began.
        """
        try:
            return await self._store.executions.save(
                dataclasses.replace(execution, instance_id=connection.instance.id)
            )
        except Conflict:
            raise StaleRecord from None

    async def _let_end(self, connection: Connection, execution_id: str) -> None:
        """Wait for a run that a lost replica left in the session; who adopts it stores it."""
        log.info("session.busy", session_id=connection.session.id, execution_id=execution_id)
        with contextlib.suppress(ExecutorError, LinkLost):
            await connection.link.attach(execution_id, 0, None)

    async def _found_again(self, run: Run) -> Outcome | None:
        execution = run.execution
        try:
            # Brought back if it has died: the journal stays with the workspace, and who takes that
            # over may know how the run ended.
            connection = await self._sessions.starter.connect(
                execution.session_id, submitted_at=execution.created_at
            )
        except AtollError as error:
            return await self._unreachable(run, error)
        if run.cancelled:
            with contextlib.suppress(ExecutorError, LinkLost):
                await connection.link.call("cancel", id=execution.id, grace=self._grace)
        intake = run.bounded(self._settings, requested=False)
        if execution.started_at is None:
            run.execution = dataclasses.replace(
                execution, instance_id=connection.instance.id, started_at=self._clock.now()
            )
        # Of its time-out a part is over, but how much is known by wall clocks alone.
        deadline = self._deadline(execution)
        try:
            async with self._until(deadline):
                raw = await connection.link.attach(execution.id, run.sequence, run, intake)
        except TimeoutError:
            return await self._end_overdue(run, connection)
        except ProtocolViolation:
            raise
        except LinkLost:
            return await self._after_loss(run, connection, deadline)
        except ExecutorError:
            # Only these: that it runs may have been recorded meanwhile, with a new version.
            run.execution = dataclasses.replace(
                run.execution,
                instance_id=execution.instance_id,
                started_at=execution.started_at,
            )
            if execution.instance_id not in (None, connection.instance.id):
                return _not_found(run)
            return None
        if execution.started_at is None:
            # Not when it was found, but when it began.
            began = datetime.fromtimestamp(raw["began"], UTC)
            started_at = min(max(began, execution.created_at), self._clock.now())
            run.execution = dataclasses.replace(run.execution, started_at=started_at)
        return await self._conclude(run, connection, raw)

    async def _unreachable(self, run: Run, error: AtollError) -> Outcome:
        """The session has no instance to run it in."""
        if isinstance(error, (ProtocolViolation, BackendUnavailable)):
            raise error
        if isinstance(error, NodeUnreachable):
            raise Elsewhere from error
        if isinstance(error, (SessionEnded, SessionNotRunning)):
            run.ended_by = await self._sessions.records.get(run.execution.session_id)
        if run.stopped:
            return cut_short(run)
        return lost(
            ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, error.message, stdout=b"", stderr=b""
        )

    def _deadline(self, execution: Execution) -> float:
        """When a run that begins now is overdue, on the monotonic clock."""
        return self._clock.monotonic() + execution.request.timeout + OVERDUE_SECONDS

    def _until(self, deadline: float) -> asyncio.Timeout:
        return asyncio.timeout(max(0.0, deadline - self._clock.monotonic()))

    async def _end_overdue(self, run: Run, connection: Connection) -> Outcome:
        """The result of an overdue run if there is one by now; else end it with its instance."""
        execution = run.execution
        intake = run.bounded(self._settings, requested=False)
        try:
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                again = await self._sessions.starter.connect(
                    execution.session_id, submitted_at=execution.created_at
                )
                raw = await again.link.attach(execution.id, run.sequence, run, intake)
        except ProtocolViolation:
            raise
        except (AtollError, TimeoutError) as error:
            log.info("execution.no_result", execution_id=execution.id, error=str(error))
        else:
            return await self._conclude(run, again, raw)
        log.warning(
            "execution.overdue", execution_id=execution.id, instance_id=connection.instance.id
        )
        connection.link.close()
        try:
            await self._driver.stop(connection.instance.handle, grace=timedelta(0))
        except TemporaryError as error:
            # A process that waits in the kernel, for a mount as an example, ends when that answers.
            # Until then the session has no other instance.
            log.warning(
                "instance.not_ended", instance_id=connection.instance.id, error=error.message
            )
        return timed_out(stdout=run.gathered("stdout"), stderr=run.gathered("stderr"))

    async def _after_loss(self, run: Run, connection: Connection, deadline: float) -> Outcome:
        """The link went: attach again if the instance is there, and say so if it is not."""
        execution = run.execution
        intake = run.bounded(self._settings, requested=False)
        while not await self._session_has_ended(run) and (
            (await self._driver.observe(connection.instance.handle)).state
            in (State.RUNNING, State.PAUSED)
        ):
            try:
                again = await self._sessions.starter.connect(
                    execution.session_id, submitted_at=execution.created_at
                )
                if run.cancelled:
                    # What was asked for may have gone with the link.
                    await again.link.call("cancel", id=execution.id, grace=self._grace)
                async with self._until(deadline):
                    raw = await again.link.attach(execution.id, run.sequence, run, intake)
                return await self._conclude(run, again, raw)
            except ExecutorError:
                break  # It does not know the run: it never had it.
            except ProtocolViolation:
                raise
            except (AtollError, TimeoutError) as error:
                if isinstance(error, NodeUnreachable):
                    raise Elsewhere from error
                if self._clock.monotonic() >= deadline:
                    return await self._end_overdue(run, connection)
                log.info("execution.reattach", execution_id=execution.id, error=str(error))
                await asyncio.sleep(REATTACH_SECONDS)
        if run.ended_by is not None:
            return cut_short(run)
        # Before the instance is replaced, and its control group goes.
        out_of_memory = await self._driver.limits.out_of_memory(connection.instance.handle)
        return await self._from_journal(run) or lost(
            ExecutionStatus.FAILED if out_of_memory else ExecutionStatus.CRASHED,
            Cause.OOM if out_of_memory else Cause.INSTANCE_LOST,
            "The execution used more memory than it may, and its instance ended."
            if out_of_memory
            else "The instance ended while the execution ran.",
            stdout=run.gathered("stdout"),
            stderr=run.gathered("stderr"),
        )

    async def _from_journal(self, run: Run) -> Outcome | None:
        """
        What became of a run whose instance has ended, if its executor wrote that down: the one that
        replaces it reads the same journal.
        """
        execution = run.execution
        try:
            connection = await self._sessions.starter.connect(
                execution.session_id, submitted_at=execution.created_at
            )
            intake = run.bounded(self._settings, requested=False)
            async with asyncio.timeout(JOURNAL_SECONDS):
                raw = await connection.link.attach(execution.id, run.sequence, run, intake)
        except TimeoutError:
            return await self._end_overdue(run, connection)
        except (ProtocolViolation, BackendUnavailable):
            raise
        except NodeUnreachable as error:
            raise Elsewhere from error
        except AtollError:
            return None
        return await self._conclude(run, connection, raw)

    async def _session_has_ended(self, run: Run) -> bool:
        """By this replica, which says so, or by another, which only the record tells."""
        if run.ended_by is None:
            session = await self._sessions.records.get(run.execution.session_id)
            rested = session.rested_at
            if session.status.ended or (rested is not None and rested >= run.execution.created_at):
                run.ended_by = session
        return run.ended_by is not None

    def _job(self, connection: Connection, execution: Execution) -> dict[str, Any]:
        request, session, settings = execution.request, connection.session, self._settings
        limits, watch = self._driver.limits.executor_limits(
            connection.instance.handle, session.resources
        )
        return {
            "id": execution.id,
            "kind": "command" if request.command is not None else request.language,
            "code": request.code,
            "command": request.command,
            "event": request.event,
            "stdin": request.stdin,
            "args": request.args,
            # A context has the session's since it was made, and may have changed them; packages can
            # be others since.
            "env": {
                **(
                    self._provisioning.variables(session)
                    if request.context_id is None
                    else self._provisioning.package_variables(session)
                ),
                **request.env,
                **_told(execution),
            },
            "cwd": inside(request.cwd),
            "timeout": request.timeout,
            "output_limit": settings.output_limit,
            "return_limit": settings.return_limit,
            "artifact_limit": MAX_ARTIFACTS,
            "limits": limits,
            "watch": watch,
            "capacity": session.capacity,
            "edition": session.version,
            "function": request.function_name,
            "body": request.body,
            "terminal": request.terminal,
            "stdin_open": request.stdin_open,
            "context": request.context_id,
            "approval_timeout": settings.approval_timeout.total_seconds(),
            "results_limit": MAX_RESULTS_SIZE,
            "heartbeat": self._heartbeat,
        }

    async def _conclude(self, run: Run, connection: Connection, raw: RunResult) -> Outcome:
        run.started()
        value, error = parse_value(bytes(run.value), self._settings.return_limit)
        if raw["reason"] == "shutdown" and await self._session_has_ended(run):
            # By another replica: its instance may stay until its files are saved, but not for us.
            self._sessions.connections.disconnect(connection.session.id)
            return cut_short(run)
        failed = raw["exit_code"] != 0 and raw["reason"] is None
        started_at = run.execution.started_at
        if started_at is not None:
            # It cannot have run for longer than it was waited for.
            elapsed = max(0.0, (self._clock.now() - started_at).total_seconds())
            raw["duration"] = min(raw["duration"], elapsed)
        outcome = conclude(
            raw,
            stdout=run.gathered("stdout"),
            stderr=run.gathered("stderr"),
            return_json=value,
            error=error,
            out_of_memory=failed
            and await self._driver.limits.out_of_memory(connection.instance.handle),
        )
        if outcome.status is ExecutionStatus.CANCELLED and run.reason is not None:
            outcome = dataclasses.replace(outcome, error=_cancelled(run))
        return outcome


def cut_short(run: Run) -> Outcome:
    """The outcome of one that was ended from outside: cancelled, or its session ended."""
    session = run.ended_by
    expired = session is not None and session.status is SessionStatus.TIMEOUT
    cause = (session.cause if session is not None else None) or Cause.USER
    told = _cancelled(run) if session is None else {"message": _over(session)}
    return lost(
        ExecutionStatus.TIMEOUT if expired else ExecutionStatus.CANCELLED,
        cause,
        told["message"],
        code=told.get("code"),
        stdout=run.gathered("stdout"),
        stderr=run.gathered("stderr"),
    )


def _over(session: Session) -> str:
    return "The session ended." if session.status.ended else "The session was stopped."


def _cancelled(run: Run) -> dict[str, str]:
    said = "" if run.reason is None else f": {run.reason}"
    return {"code": "cancelled", "message": f"The execution was cancelled{said or '.'}"}


def _told(execution: Execution) -> dict[str, str]:
    """What code can know of the request that it runs for."""
    told = {"ATOLL_EXECUTION_ID": execution.id, "ATOLL_SESSION_ID": execution.session_id}
    if execution.invocation_id is not None:
        told["ATOLL_INVOCATION_ID"] = execution.invocation_id
    if execution.request.content_type is not None:
        told["ATOLL_CONTENT_TYPE"] = execution.request.content_type
    return told


def _not_found(run: Run) -> Outcome:
    return lost(
        ExecutionStatus.CRASHED,
        Cause.INSTANCE_LOST,
        "The instance that it may have begun in is gone.",
        stdout=run.gathered("stdout"),
        stderr=run.gathered("stderr"),
    )


def inside(cwd: str | None) -> str:
    """The working directory: beneath the workspace unless it is absolute."""
    if cwd is None:
        return "/workspace"
    return cwd if cwd.startswith("/") else f"/workspace/{cwd}"


def _without(error: PermanentError | ExecutorError) -> Outcome:
    """Of one that was not begun, because something that it needs is not to be had."""
    return lost(
        ExecutionStatus.FAILED,
        Cause.DEPENDENCY,
        error.message,
        code=error.code,
        stdout=b"",
        stderr=b"",
    )
