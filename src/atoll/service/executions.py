"""
Executions: submitted, followed, answered.

An execution costs two commits: the record before it runs, and the result. Between the two it lives
in a `Running` here, which hears the output as it comes and tells those who wait; nobody polls. A
result is acknowledged to the executor only when it is stored, so a control plane that dies in
between finds it in the executor's journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.errors import AtollError, Conflict, InvalidRequest, NotFound, TemporaryError
from atoll.link.client import ExecutorError, LinkLost, parse_value
from atoll.model.execution import Execution, ExecutionStatus, Outcome, Request
from atoll.model.instance import State
from atoll.model.outcome import conclude, lost
from atoll.model.session import Cause, Session, SessionStatus
from atoll.service.running import Heard, Queue, Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.model.page import Page
    from atoll.service.sessions import Live, Sessions
    from atoll.service.tasks import Tasks
    from atoll.settings import Settings
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

CANCEL_GRACE = 2.0
END_MARGIN = 30.0
"""Seconds beyond its time-out after which an execution that was not ended is given up."""
REATTACH_SECONDS = 0.5
SAVE_BACKOFF = (1.0, 2.0, 4.0, 10.0)


class Executions:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        sessions: Sessions,
        tasks: Tasks,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._store = store
        self._driver = driver
        self._sessions = sessions
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

    @property
    def running_count(self) -> int:
        return len(self._running)

    # Verbs

    async def submit(self, session_id: str, request: Request) -> Running:
        """Record the execution, and start it as soon as its session is free."""
        most = self._settings.execution.max_timeout.total_seconds()
        if request.timeout > most:
            raise InvalidRequest(
                f"timeout: at most {most:g} seconds are allowed here.", field="timeout"
            )
        if self._sessions.session_of(session_id) is None:
            session = await self._sessions.get(session_id)
            if session.status.ended:
                raise Conflict(
                    f"Session {session_id} has ended ({session.status}).",
                    code="session_ended",
                    status_now=session.status.value,
                )
        queue = self._queues.setdefault(session_id, Queue())
        ahead = len(queue.waiting) + queue.coming
        if ahead >= self._settings.execution.queue_limit:
            raise TemporaryError(
                f"{ahead} executions are waiting for session {session_id} already.",
                code="session_busy",
            )
        now = self._clock.now()
        execution = Execution(
            id=ids.execution_id(now),
            session_id=session_id,
            request=request,
            status=ExecutionStatus.PENDING,
            created_at=now,
        )
        queue.coming += 1
        try:
            await self._store.executions.add(execution)
        finally:
            queue.coming -= 1
            self._forget(session_id, queue)
        return self.resume(execution)

    def resume(self, execution: Execution) -> Running:
        """Run an execution that is recorded and has not begun."""
        running = self._running[execution.id] = Running(execution)
        # Before the first await: the order of the turns is that of the calls.
        queue = self._queues.setdefault(execution.session_id, Queue())
        running.turn = queue.join()
        running.task = self._tasks.start(
            self._run(running, queue, running.turn), f"run {execution.id}"
        )
        return running

    async def get(self, execution_id: str) -> Execution:
        running = self._running.get(execution_id)
        if running is not None:
            return running.execution
        execution = await self._store.executions.get(execution_id)
        if execution is None:
            raise NotFound(f"No execution has the id {execution_id}.", code="execution_not_found")
        return execution

    async def list(
        self,
        *,
        session_id: str,
        status: ExecutionStatus | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Execution]:
        await self._sessions.get(session_id)
        page = await self._store.executions.page(
            session_id=session_id, status=status, cursor=cursor, limit=limit
        )
        items = tuple(
            self._running[item.id].execution if item.id in self._running else item
            for item in page.items
        )
        return dataclasses.replace(page, items=items)

    async def wait(self, execution_id: str, seconds: float) -> Execution:
        """The execution when it has ended, or as it is after so many seconds."""
        running = self._running.get(execution_id)
        if running is None:
            return await self.get(execution_id)
        return await self.await_end(running, seconds)

    async def await_end(self, running: Running, seconds: float) -> Execution:
        seconds = min(seconds, self._settings.execution.max_wait.total_seconds())
        if seconds > 0 and not running.done.done():
            await asyncio.wait([running.done], timeout=seconds)
        return running.execution

    async def cancel(self, execution_id: str) -> Execution:
        """End an execution: asked first, then made to. One that has ended stays as it ended."""
        running = self._running.get(execution_id)
        if running is None:
            return await self.get(execution_id)
        running.cancelled = True
        running.give_up_turn()
        live = self._sessions.reachable(running.execution.session_id)
        # Not begun: `_run` sees the mark. Or just over: then its result stands.
        if live is not None:
            with contextlib.suppress(ExecutorError):
                await live.link.call("cancel", id=execution_id, grace=CANCEL_GRACE)
        await asyncio.wait([running.done], timeout=CANCEL_GRACE + 3)
        return running.execution

    async def events(self, execution_id: str, after: int) -> AsyncIterator[tuple[int, str, Any]]:
        """
        What happens to an execution, each event with a number that is larger than the last one's,
        from behind the number `after` on; the last event is `result` with the execution.
        """
        heard = Heard(after)
        running = self._running.get(execution_id)
        if running is None:
            execution = await self.get(execution_id)
            for event in _replay(execution):
                if (told := heard.hear(*event)) is not None:
                    yield told
        else:
            running.listeners += 1
            try:
                position = 0
                while True:
                    running.changed.clear()
                    while position < len(running.events):
                        name, data = running.events[position]
                        position += 1
                        if (told := heard.hear(name, bytes(data))) is not None:
                            yield told
                    if running.done.done():
                        break
                    await running.changed.wait()
            finally:
                running.listeners -= 1
            execution = running.execution
        if execution.outcome is not None and heard.end() > after:
            yield heard.end(), "result", execution

    # The run itself

    async def _run(self, running: Running, queue: Queue, turn: asyncio.Future[bool]) -> None:
        try:
            await turn
            try:
                outcome = await self._outcome(running)
            except Exception as error:  # Whatever it is, an execution has an end.
                execution_id = running.execution.id
                log.error("execution.broke", execution_id=execution_id, exc_info=error)
                words = "Something broke in the server; it is in its log."
                outcome = lost(ExecutionStatus.CRASHED, Cause.DRIVER, words, stdout=b"", stderr=b"")
            await self._finish(running, outcome)
        finally:
            self._leave(running, queue, turn)

    def _leave(self, running: Running, queue: Queue, turn: asyncio.Future[bool]) -> None:
        queue.leave(turn)
        self._forget(running.execution.session_id, queue)
        self._running.pop(running.execution.id, None)

    def _forget(self, session_id: str, queue: Queue) -> None:
        """Drop a queue that nobody is in, and no other: a new one may have taken its place."""
        if not queue.busy and not queue.coming and self._queues.get(session_id) is queue:
            del self._queues[session_id]

    async def _outcome(self, running: Running) -> Outcome:
        execution = running.execution
        if running.cancelled or running.ended_by is not None:
            return self._cut_short(running)
        try:
            live = await self._sessions.live(execution.session_id)
        except AtollError as error:
            if running.ended_by is not None:
                return self._cut_short(running)
            return lost(
                ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, error.message, stdout=b"", stderr=b""
            )
        # What the kernel ended for memory before this one is not this one's.
        await self._driver.out_of_memory(live.instance.handle)
        if running.cancelled or running.ended_by is not None:
            return self._cut_short(running)
        running.execution = execution = dataclasses.replace(
            execution, instance_id=live.instance.id, started_at=self._clock.now()
        )
        try:
            async with asyncio.timeout(execution.request.timeout + END_MARGIN):
                raw = await live.link.run(self._job(live, execution), running)
        except TimeoutError:
            # It ends executions itself; one that does not is of no more use.
            live.link.close()
            return await self._after_loss(running, live)
        except LinkLost:
            return await self._after_loss(running, live)
        except ExecutorError as error:
            return lost(
                ExecutionStatus.CRASHED, Cause.DRIVER, error.message, stdout=b"", stderr=b""
            )
        return await self._conclude(running, live, raw)

    def attach(self, execution: Execution, live: Live) -> None:
        """Follow an execution that an earlier process of the control plane started."""
        running = self._running[execution.id] = Running(execution)
        queue = self._queues.setdefault(execution.session_id, Queue())
        turn = queue.join()
        running.task = self._tasks.start(
            self._attached(running, live, queue, turn), f"attach {execution.id}"
        )

    async def _attached(
        self, running: Running, live: Live, queue: Queue, turn: asyncio.Future[bool]
    ) -> None:
        try:
            running.started()
            try:
                raw = await live.link.attach(running.execution.id, 0, running)
                outcome = await self._conclude(running, live, raw)
            except (LinkLost, ExecutorError):
                outcome = await self._after_loss(running, live)
            await self._finish(running, outcome)
        finally:
            self._leave(running, queue, turn)

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

    async def abandon(self, execution: Execution, cause: Cause, message: str) -> None:
        """Record that an execution died with the instance it was on."""
        outcome = lost(ExecutionStatus.CRASHED, cause, message, stdout=b"", stderr=b"")
        await self._finish(Running(execution), outcome)

    async def _after_loss(self, running: Running, live: Live) -> Outcome:
        """The link went: attach again if the instance is there, and say so if it is not."""
        if running.ended_by is not None:
            return self._cut_short(running)
        deadline = self._clock.monotonic() + running.execution.request.timeout + END_MARGIN
        while (await self._driver.observe(live.instance.handle)).state is State.RUNNING:
            try:
                again = await self._sessions.live(running.execution.session_id)
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    raw = await again.link.attach(running.execution.id, running.sequence, running)
                return await self._conclude(running, again, raw)
            except ExecutorError:
                break  # It does not know the run: it never had it.
            except (AtollError, TimeoutError) as error:
                if running.ended_by is not None:
                    return self._cut_short(running)
                if self._clock.monotonic() >= deadline:
                    break
                log.info("execution.reattach", execution_id=running.execution.id, error=str(error))
                await asyncio.sleep(REATTACH_SECONDS)
        cause = Cause.OOM if await self._driver.out_of_memory(live.instance.handle) else None
        return lost(
            ExecutionStatus.CRASHED,
            cause or Cause.INSTANCE_LOST,
            "The instance ended while the execution ran.",
            stdout=running.gathered("stdout"),
            stderr=running.gathered("stderr"),
        )

    def _cut_short(self, running: Running) -> Outcome:
        """Ended from outside: cancelled, or its session ended."""
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

    def let_go(self) -> None:
        """Follow nothing any more: what runs goes on, and is found again by the next start."""
        for running in self._running.values():
            if running.task is not None and running.ended_by is None:
                running.task.cancel()

    def _session_ended(self, session: Session) -> None:
        for running in self._running.values():
            if running.execution.session_id == session.id:
                running.ended_by = session
                running.give_up_turn()

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
                execution = await self._store.executions.save(execution)
                break
            except TemporaryError as error:
                pause = SAVE_BACKOFF[min(attempt, len(SAVE_BACKOFF) - 1)]
                attempt += 1
                log.warning("execution.not_stored", execution_id=execution.id, error=error.message)
                await asyncio.sleep(pause)
            except Conflict:
                # Somebody else stored a result first; that one counts.
                stored = await self._store.executions.get(execution.id)
                execution = stored or execution
                break
        live = self._sessions.reachable(execution.session_id)
        if live is not None:
            live.link.acknowledge(execution.id)
        self.finished[execution.status] = self.finished.get(execution.status, 0) + 1
        self.seconds += outcome.execution_time
        running.finish(execution)


def _inside(cwd: str | None) -> str:
    """The working directory: beneath the workspace unless it is absolute."""
    if cwd is None:
        return "/workspace"
    return cwd if cwd.startswith("/") else f"/workspace/{cwd}"


def _replay(execution: Execution) -> list[tuple[str, bytes]]:
    """The events of an execution that has ended, from its record: output whole, in two pieces."""
    outcome = execution.outcome
    events = [("started", b"")]
    if outcome is not None:
        events += [("stdout", outcome.stdout), ("stderr", outcome.stderr)]
    return events
