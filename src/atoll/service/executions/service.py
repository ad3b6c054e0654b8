"""
Executions: submitted, found, waited for, cancelled, talked to, heard.

An execution costs two commits: the record before it runs, and the result. Between the two one
replica sees to it (`runs`). Any other answers for it as well: it waits for the message that it has
ended, passes a cancellation on, and hears its output from the executor itself. Nobody polls.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from atoll import ids
from atoll.errors import (
    AtollError,
    Conflict,
    CoordinationUnavailable,
    InvalidRequest,
    NotFound,
    PermanentError,
    TemporaryError,
)
from atoll.link.errors import QueueFull, RunNotActive, StdinClosed
from atoll.model.event import execution_event
from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.model.stream_event import StreamEvent
from atoll.service.executions import event_log
from atoll.service.executions.follower import Followers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.page import Page
    from atoll.service.contexts.service import Contexts
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.completion import Completions
    from atoll.service.executions.offload import Offload
    from atoll.service.executions.run import Run
    from atoll.service.executions.runner import Runner
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess
    from atoll.settings import Settings
    from atoll.stores.stale_cache import CachedEntity

CANCEL_MARGIN = 3.0
"""Seconds that a cancellation waits beyond the grace for the end to be recorded."""


class Overtaken(Conflict):
    """Another execution has the place in the invocation that this one was to have."""


class Executions:
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
        runner: Runner,
        completions: Completions,
        offload: Offload,
        approvals: Approvals,
        contexts: Contexts,
        settings: Settings,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._background = replica.background
        self._clock = replica.clock
        self._sessions = sessions
        self._runner = runner
        self._completions = completions
        self._offload = offload
        self._approvals = approvals
        self._contexts = contexts
        self._settings = settings
        self._followers = Followers(sessions, completions, replica.background, settings.execution)
        self._submitting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By the id that is being submitted, as long as somebody does."""

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
        Record the execution and start it as soon as its session is free. One whose id is given and
        exists is not recorded again. `after` is the latest execution of an invocation, which has
        failed, and that this is the next one of. `Overtaken` when the invocation has that already.
        """
        most = self._settings.execution.max_timeout.total_seconds()
        if request.timeout > most:
            raise InvalidRequest(
                f"timeout: at most {most:g} seconds are allowed here.", field="timeout"
            )
        if execution_id is None:
            return await self._record(session_id, request, None, invocation_id, after)
        # One after the other: what the first has recorded it has started too when the next looks,
        # which would otherwise take it for a stray.
        lock = self._submitting.setdefault(execution_id, asyncio.Lock())
        async with lock:
            if (
                self._runner.get(execution_id) is not None
                # To record it may start the session, which a repeated request is not to do.
                or request.context_id is not None
                or self._sessions.connections.reachable(session_id) is None
            ):
                known = await self._known(execution_id, session_id, invocation_id, request)
                if known is not None:
                    return known
            try:
                return await self._record(session_id, request, execution_id, invocation_id, after)
            except AtollError:
                # A repeated request finds what the first one made, also where nothing new may be
                # submitted any more.
                known = await self._known(execution_id, session_id, invocation_id, request)
                if known is None:
                    raise
                return known

    async def repeat(self, execution: Execution) -> Run:
        """An execution that is recorded, whatever it was submitted with."""
        lock = self._submitting.setdefault(execution.id, asyncio.Lock())
        async with lock:
            found = await self._known(execution.id, execution.session_id, execution.invocation_id)
        return self._runner.stand_in(execution) if found is None else found

    async def _record(
        self,
        session_id: str,
        request: Request,
        execution_id: str | None,
        invocation_id: str | None,
        after: Execution | None,
    ) -> Run:
        if request.context_id is not None:
            await self._contexts.check(session_id, request)
        connection, rested = self._sessions.connections.reachable(session_id), None
        if connection is not None:
            instance_id, capacity = connection.instance.id, connection.session.capacity
        else:
            session = await self._sessions.starter.startable(session_id)
            instance_id, capacity = session.instance_id or "", session.capacity
            rested = session.rested_at
        if not self._leases.valid:
            raise CoordinationUnavailable(
                "Redis does not answer, so nothing new can be started.",
            )
        queue = self._runner.queue(session_id, capacity)
        ahead = len(queue.waiting) + queue.coming
        if ahead >= self._settings.execution.queue_limit:
            raise TemporaryError(
                f"{ahead} executions are waiting for session {session_id} already.",
                code="session_busy",
            )
        now = self._clock.now()
        if rested is not None:
            # By whatever clock it was stopped, this came later, and starts it.
            now = max(now, rested + timedelta(microseconds=1))
        may_be_repeated = execution_id is not None or invocation_id is not None
        if execution_id is None:
            execution_id = ids.execution_id(now)
        execution = Execution(
            id=execution_id,
            invocation_id=invocation_id or ids.invocation_id(execution_id),
            ordinal=1 if after is None else after.ordinal + 1,
            invoked_at=None if after is None else after.invoked_at or after.created_at,
            session_id=session_id,
            request=request,
            status=ExecutionStatus.PENDING,
            created_at=now,
            # Where it is to begin: another instance later means that it may have been lost.
            instance_id=instance_id or None,
            holder=self._leases.replica,
        )
        queue.coming += 1
        was_away = self._store.unavailable
        try:
            stored = await self._offload.put_away(execution)
            event = execution_event(execution, "submitted", now)
            if after is None:
                await self._store.executions.add(stored, event=event)
            else:
                await self._store.executions.add_after(stored, after, event=event)
        except TemporaryError:
            # With an id it may be repeated, and is found then. While the database is known to be
            # away nothing gets there, and what waits for its return must not grow with each call.
            if not may_be_repeated and not was_away:
                self._background.start(
                    self._runner.revoke_later(execution.id), f"revoke {execution.id}"
                )
            raise
        except Conflict as error:
            known = await self._known(execution_id, session_id, invocation_id, request)
            if known is None:
                raise Overtaken(
                    f"Invocation {execution.invocation_id} has another execution already.",
                    code="invocation_id_in_use",
                ) from error
            # The same request, here or at a replica that was taken for lost, was quicker.
            return known
        finally:
            queue.coming -= 1
            self._runner.forget(session_id, queue)
        if stored is not execution:
            execution = dataclasses.replace(execution, kept=stored.kept)
        return self._runner.start(execution, capacity)

    async def _known(
        self,
        execution_id: str,
        session_id: str,
        invocation_id: str | None,
        request: Request | None = None,
    ) -> Run | None:
        """The execution with this id; `Conflict` when it is not what is asked for now."""
        run = self._runner.get(execution_id)
        execution = None if run is None else run.execution
        if execution is None:
            execution = await self._store.executions.get(execution_id)
        if execution is None:
            return None
        if execution.session_id != session_id:
            raise Conflict(
                f"Execution {execution_id} is one of another session.", code="execution_id_in_use"
            )
        if invocation_id not in (None, execution.invocation_id):
            raise Conflict(
                f"Execution {execution_id} is one of another invocation.",
                code="execution_id_in_use",
            )
        if request is not None:
            await self._check_same_work(execution, request, run)
        if run is not None:
            return run
        if execution.holder == self._leases.replica and not execution.status.ended:
            # Recorded here, though nobody was told so: the answer of the store was lost. Written
            # once more, so that who looks for such strays does not take it for one.
            capacity = await self._runner.capacity_here(session_id)
            execution = await self._store.executions.save(execution)
            return self._runner.start(execution, capacity or 1, adopted=True)
        return self._runner.stand_in(await self._offload.fetch(execution))

    async def _check_same_work(
        self, execution: Execution, request: Request, run: Run | None
    ) -> None:
        try:
            if run is not None and not run.adopted:
                first = execution.request  # Complete, as it was submitted here.
            else:
                first = await self._offload.request_of(execution)
        except (PermanentError, TemporaryError):
            return  # The blob store has lost it or is away: there is nothing to compare with.
        if not first.same_work(request):
            raise Conflict(
                f"Execution {execution.id} exists, with other code, command or input. Use a new id "
                "for new work.",
                code="execution_id_in_use",
            )

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
        return await self._offload.fetch(execution)

    async def look(self, execution_id: str, *, wait: float = 0.0) -> tuple[Execution, float | None]:
        """
        The execution, waited for as `wait` does; while the database is unavailable the cached one,
        with its age in seconds. May be stale: for display, not for decisions.
        """
        cache = self._store.cached_executions
        try:
            return await self.wait(execution_id, wait, cached=cache.get(execution_id)), None
        except TemporaryError:
            cached = cache.get(execution_id)
            if cached is None:
                raise
            return await self._offload.fetch(cached.entity), cached.age

    async def list(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None,
        limit: int,
    ) -> Page[Execution]:
        """A page of records; of large ones only the beginning is in it."""
        if session_id is not None:
            await self._sessions.records.get(session_id)
        page = await self._store.executions.page(
            session_id=session_id,
            invocation_id=invocation_id,
            status=status,
            cursor=cursor,
            limit=limit,
        )
        items = tuple(
            self.under_way(item) if not item.status.ended else item for item in page.items
        )
        return dataclasses.replace(page, items=items)

    def under_way(self, execution: Execution) -> Execution:
        """What is known here beyond the record, which says late that it runs, or never."""
        run = self._runner.get(execution.id)
        return execution if run is None else run.execution

    async def wait(
        self,
        execution_id: str,
        seconds: float,
        *,
        cached: CachedEntity[Execution] | None = None,
    ) -> Execution:
        """The execution when it has ended, or as it is after so many seconds."""
        run = self._runner.get(execution_id)
        if run is not None:
            return await self.await_end(run, seconds)
        execution = await self.get(execution_id, cached=cached)
        seconds = min(seconds, self._settings.execution.max_wait.total_seconds())
        if execution.status.ended or seconds <= 0:
            return execution
        ended = await self._completions.within(execution_id, seconds)
        return execution if ended is None else await self._offload.fetch(ended)

    async def await_end(self, run: Run, seconds: float) -> Execution:
        seconds = min(seconds, self._settings.execution.max_wait.total_seconds())
        if seconds > 0 and not run.done.done():
            await asyncio.wait([run.done], timeout=seconds)
        return run.execution

    async def cancel(self, execution_id: str, reason: str | None = None) -> Execution:
        """
        End an execution: asked first, then made to. One that was cancelled before stays so; one
        that has ended otherwise is a `Conflict`.
        """
        grace = self._settings.execution.cancel_grace.total_seconds() + CANCEL_MARGIN
        run = self._runner.get(execution_id)
        if run is not None:
            await self._runner.cancel(run, reason)
            await asyncio.wait([run.done], timeout=grace)
            execution = run.execution
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

    # While it runs

    async def inject(self, execution_id: str, message: str) -> None:
        """A message that the code can read."""
        await self._talk(execution_id, "message", text=message)

    async def type(self, execution_id: str, data: str, *, eof: bool) -> None:
        """More for its stdin, as base64."""
        await self._talk(execution_id, "stdin", data=data, eof=eof)

    async def _talk(self, execution_id: str, operation: str, **content: Any) -> None:
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
        """Answer what the execution asks."""
        execution = await self.get(execution_id)
        await self._approvals.resume(
            execution_id, answer, approval=approval, status=execution.status.value
        )
        return execution

    async def question(self, execution: Execution) -> dict[str, Any] | None:
        """What an execution that runs waits to be told."""
        if execution.status.ended:
            return None
        try:
            return await self._approvals.question(execution.id)
        except TemporaryError:
            # Redis is away: all else that is known of it can be shown.
            return None

    # What happens to it

    async def events(self, execution_id: str, after: int) -> AsyncIterator[StreamEvent]:
        """
        What happens to an execution from behind the number `after` on; the last event is `result`
        with the execution.
        """
        run = self._runner.get(execution_id)
        if run is not None:
            async for event in _live_events(run, after):
                yield event
            return
        execution = await self.get(execution_id)
        if execution.status.ended:
            for event in event_log.replay(execution):
                if (event.number or 0) > after:
                    yield event
            return
        mirror = self._followers.join(execution)
        try:
            async for event in _live_events(mirror, after):
                yield event
        finally:
            self._followers.leave(mirror)


async def _live_events(run: Run, after: int) -> AsyncIterator[StreamEvent]:
    position, beats, ahead = 0, run.beats, None
    while True:
        run.changed.clear()
        while (position := max(position, run.forgotten)) < run.told:
            event = run.events[position - run.forgotten]
            position += 1
            if (event.number or 0) > after:
                yield event
        if run.done.done():
            break
        if run.ahead != ahead:
            ahead = run.ahead
            if ahead is not None:
                yield StreamEvent(None, "queued", {"ahead": ahead})
                continue  # Whatever came meanwhile may have been cleared by another reader.
        if run.beats != beats:
            beats = run.beats
            yield StreamEvent(None, "heartbeat", {})
            continue
        await run.changed.wait()
    execution = run.execution
    if execution.outcome is not None:
        last = event_log.of_result(execution.retry_count)
        if last > after:
            yield StreamEvent(last, "result", execution)


def _not_running(execution: Execution, code: str = "execution_not_running") -> Conflict:
    words = "takes no more input" if code == "stdin_closed" else "does not run"
    return Conflict(
        f"Execution {execution.id} {words} ({execution.status}).",
        code=code,
        status_now=execution.status.value,
    )
