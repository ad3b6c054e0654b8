"""
The verbs of the API for executions.

An execution costs two commits: the record before it runs, and the result; one that runs for over a
second, or whose session has to be started, costs a third. In between one replica owns it
(`runner.py`). Every other replica serves it as well: it waits for the notification of its end
(`records.py`), passes a cancellation on, and receives its output from the executor itself
(`follower.py`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, NotFound, TemporaryError
from atoll.link.errors import QueueFull, RunNotActive, StdinClosed
from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.service.executions import event_log
from atoll.service.executions.follower import Followers
from atoll.service.executions.submit import Submission

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.page import Page
    from atoll.model.stream_event import StreamEvent
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.executions.run import Run
    from atoll.service.executions.runner import Runner
    from atoll.service.executions.submit import Submitter
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.settings import ExecutionSettings
    from atoll.stores.stale_cache import CachedEntity

CANCEL_MARGIN = 3.0
"""Seconds that a cancellation waits beyond the grace for the end to be recorded."""


class Executions:
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        submitter: Submitter,
        runner: Runner,
        records: ExecutionRecords,
        approvals: Approvals,
        settings: ExecutionSettings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._sessions = sessions
        self._submitter = submitter
        self._runner = runner
        self._records = records
        self._approvals = approvals
        self._settings = settings
        self._max_wait = settings.max_wait.total_seconds()
        self._followers = Followers(sessions, records, replica.background, settings)

    async def submit(
        self,
        session_id: str,
        request: Request,
        *,
        execution_id: str | None = None,
        invocation_id: str | None = None,
        after: Execution | None = None,
    ) -> Run:
        """
        Record an execution and start it as soon as its session has a free slot; see `Submitter`.
        `after` is the failed execution of the invocation that this one follows.
        """
        return await self._submitter.submit(
            Submission(session_id, request, execution_id, invocation_id, after)
        )

    async def repeat(self, execution: Execution) -> Run:
        """The recorded execution, without comparing requests."""
        return await self._submitter.repeat(execution)

    async def get(
        self, execution_id: str, *, cached: CachedEntity[Execution] | None = None
    ) -> Execution:
        """With `cached`, which can be shown instead, the database has little time to answer."""
        run = self._runner.get(execution_id)
        if run is not None:
            return run.execution
        async with self._store.bounded_read(cached):
            execution = await self._store.executions.get(execution_id)
        if execution is None:
            raise NotFound(f"No execution has the id {execution_id}.", code="execution_not_found")
        return await self._records.complete(execution)

    async def get_or_recall(
        self, execution_id: str, *, wait: float = 0.0
    ) -> tuple[Execution, float | None]:
        """
        The execution, as `wait` returns it; while the database does not answer, the last known
        state with its age in seconds. For display, not for decisions.
        """
        cache = self._store.cached_executions
        try:
            return await self.wait(execution_id, wait, cached=cache.get(execution_id)), None
        except TemporaryError:
            cached = cache.get(execution_id)
            if cached is None:
                raise
            return await self._records.complete(cached.entity), cached.age

    async def list(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None,
        limit: int,
    ) -> Page[Execution]:
        """A page of records; of large requests and output it has only the head."""
        if session_id is not None:
            await self._sessions.records.get(session_id)
        page = await self._store.executions.page(
            session_id=session_id,
            invocation_id=invocation_id,
            status=status,
            cursor=cursor,
            limit=limit,
        )
        items = tuple(item if item.status.ended else self.in_flight(item) for item in page.items)
        return dataclasses.replace(page, items=items)

    def in_flight(self, execution: Execution) -> Execution:
        """With what is known here beyond the record, which shows `running` late or never."""
        run = self._runner.get(execution.id)
        return execution if run is None else run.execution

    async def wait(
        self,
        execution_id: str,
        seconds: float,
        *,
        cached: CachedEntity[Execution] | None = None,
    ) -> Execution:
        """The execution when it has ended, or its current state after so many seconds."""
        run = self._runner.get(execution_id)
        if run is not None:
            return await self.await_end(run, seconds)
        execution = await self.get(execution_id, cached=cached)
        seconds = min(seconds, self._max_wait)
        if execution.status.ended or seconds <= 0:
            return execution
        ended = await self._records.wait(execution_id, seconds)
        return execution if ended is None else await self._records.complete(ended)

    async def await_end(self, run: Run, seconds: float) -> Execution:
        """Wait for an execution that this replica has submitted, as `wait` does."""
        return await run.wait(min(seconds, self._max_wait))

    async def cancel(self, execution_id: str, reason: str | None = None) -> Execution:
        """
        Cancel an execution: the code is asked to end, then killed. Repeating it changes nothing; if
        the execution has ended otherwise, it is a `Conflict`.
        """
        grace = self._settings.cancel_grace.total_seconds() + CANCEL_MARGIN
        run = self._runner.get(execution_id)
        if run is not None:
            await self._runner.cancel(run, reason)
            execution = await run.wait(grace)
            # It may have another owner before it has ended.
            await self._runner.pass_cancellation_on(run)
        else:
            execution = await self.get(execution_id)
            if not execution.status.ended:
                await self._coordination.cancel(execution_id, reason or "")
                execution = await self.wait(execution_id, grace)
        if execution.status.ended and execution.status is not ExecutionStatus.CANCELLED:
            raise Conflict(
                f"Execution {execution_id} has ended ({execution.status}).",
                code="execution_ended",
                status_now=execution.status.value,
            )
        return execution

    # Input

    async def inject(self, execution_id: str, message: str) -> None:
        """Send a message that the code can read."""
        await self._send(execution_id, "message", text=message)

    async def write_stdin(self, execution_id: str, data: str, *, eof: bool) -> None:
        """Append to its stdin, as base64."""
        await self._send(execution_id, "stdin", data=data, eof=eof)

    async def _send(self, execution_id: str, operation: str, **content: Any) -> None:
        execution = await self.get(execution_id)
        if execution.status.ended:
            raise _not_running(execution)
        connection = await self._sessions.connections.reach(execution.session_id)
        if connection is None:
            raise _not_running(execution)
        try:
            await connection.link.call(operation, id=execution_id, **content)
        except RunNotActive as error:
            raise _not_running(await self.get(execution_id)) from error
        except StdinClosed as error:
            raise _not_running(await self.get(execution_id), "stdin_closed") from error
        except QueueFull as error:
            raise TemporaryError(
                f"Execution {execution_id} has not read its earlier input. Retry in a few seconds.",
                code="queue_full",
            ) from error

    async def resume(
        self, execution_id: str, answer: dict[str, Any], *, approval: str | None
    ) -> Execution:
        """Answer the question that the execution asks."""
        execution = await self.get(execution_id)
        await self._approvals.resume(
            execution_id, answer, approval=approval, status=execution.status.value
        )
        return execution

    async def question(self, execution: Execution) -> dict[str, Any] | None:
        """The question that a running execution asks, if it is known."""
        if execution.status.ended:
            return None
        try:
            return await self._approvals.question(execution.id)
        except TemporaryError:
            # Without Redis, everything else about the execution can still be shown.
            return None

    # Events

    async def events(self, execution_id: str, after: int) -> AsyncIterator[StreamEvent]:
        """Events after number `after`; the last one is `result`, with the execution."""
        run = self._runner.get(execution_id)
        if run is not None:
            async for event in run.stream(after):
                yield event
            return
        execution = await self.get(execution_id)
        if execution.status.ended:
            for event in event_log.replay(execution):
                if (event.number or 0) > after:
                    yield event
            return
        with self._followers.follow(execution) as run:
            async for event in run.stream(after):
                yield event


def _not_running(execution: Execution, code: str = "execution_not_running") -> Conflict:
    problem = "takes no more input" if code == "stdin_closed" else "does not run"
    return Conflict(
        f"Execution {execution.id} {problem} ({execution.status}).",
        code=code,
        status_now=execution.status.value,
    )
