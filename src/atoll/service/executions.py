"""
Executions: submitted, found, waited for, cancelled, heard.

An execution costs two commits: the record before it runs, and the result. Between the two one
replica sees to it (`runs`). Any other answers for it as well: it waits for the message that it has
ended, passes a cancellation on, and hears its output from the executor itself. Nobody polls.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.errors import Conflict, InvalidRequest, NotFound, TemporaryError
from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.service.attempts import CANCEL_GRACE
from atoll.service.mirror import Mirrors
from atoll.service.running import Heard, Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.model.page import Page
    from atoll.service.bulk import Bulk
    from atoll.service.ends import Ends
    from atoll.service.leases import Leases
    from atoll.service.lives import Lives
    from atoll.service.runs import Runs
    from atoll.service.tasks import Tasks
    from atoll.settings import Settings
    from atoll.stores.recall import RecallingStore, Remembered


class Executions:
    def __init__(
        self,
        store: RecallingStore,
        lives: Lives,
        runs: Runs,
        ends: Ends,
        bulk: Bulk,
        coordination: Coordination,
        leases: Leases,
        tasks: Tasks,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._store = store
        self._lives = lives
        self._runs = runs
        self._ends = ends
        self._bulk = bulk
        self._coordination = coordination
        self._leases = leases
        self._tasks = tasks
        self._clock = clock
        self._settings = settings
        self._mirrors = Mirrors(lives, ends, tasks)

    async def submit(
        self, session_id: str, request: Request, *, execution_id: str | None = None
    ) -> Running:
        """
        Record the execution, and start it as soon as its session is free. One whose id is given and
        exists is not recorded again.
        """
        most = self._settings.execution.max_timeout.total_seconds()
        if request.timeout > most:
            raise InvalidRequest(
                f"timeout: at most {most:g} seconds are allowed here.", field="timeout"
            )
        if execution_id is not None:
            known = await self._known(execution_id)
            if known is not None:
                return known
        live = self._lives.reachable(session_id)
        if live is not None:
            instance_id: str | None = live.instance.id
        else:
            instance_id = (await self._lives.usable(session_id)).instance_id
        if not self._leases.valid:
            raise TemporaryError(
                "Redis does not answer, so nothing new can be started.",
                code="coordination_unavailable",
            )
        queue = self._runs.queue(session_id)
        ahead = len(queue.waiting) + queue.coming
        if ahead >= self._settings.execution.queue_limit:
            raise TemporaryError(
                f"{ahead} executions are waiting for session {session_id} already.",
                code="session_busy",
            )
        now = self._clock.now()
        execution = Execution(
            id=execution_id or ids.execution_id(now),
            session_id=session_id,
            request=request,
            status=ExecutionStatus.PENDING,
            created_at=now,
            # Where it is to begin: another instance later means that it may have been lost.
            instance_id=instance_id,
            holder=self._leases.replica,
        )
        queue.coming += 1
        was_away = self._store.away
        try:
            stored = await self._bulk.put_away(execution)
            await self._store.executions.add(stored)
        except TemporaryError:
            # With an id it may be repeated, and is found then. While the database is known to be
            # away nothing gets there, and what waits for its return must not grow with each call.
            if execution_id is None and not was_away:
                self._tasks.start(self._runs.revoke_later(execution.id), f"revoke {execution.id}")
            raise
        except Conflict:
            known = None if execution_id is None else await self._known(execution_id)
            if known is None:
                raise
            # A replica that was taken for lost was at the same request, and was quicker.
            return known
        finally:
            queue.coming -= 1
            self._runs.forget(session_id, queue)
        return self._runs.start(dataclasses.replace(execution, kept=stored.kept))

    async def _known(self, execution_id: str) -> Running | None:
        running = self._runs.get(execution_id)
        if running is not None:
            return running
        execution = await self._store.executions.get(execution_id)
        if execution is None:
            return None
        if execution.holder == self._leases.replica and not execution.status.ended:
            # Recorded here, though nobody was told so: the answer of the store was lost. Written
            # once more, so that who looks for such strays does not take it for one.
            return self._runs.start(await self._store.executions.save(execution), adopted=True)
        return self._runs.stand_in(await self._bulk.fetch(execution))

    async def get(
        self, execution_id: str, *, remembered: Remembered[Execution] | None = None
    ) -> Execution:
        """With `remembered`, which will do as well, the database has little time to answer."""
        running = self._runs.get(execution_id)
        if running is not None:
            return running.execution
        async with self._store.patience(remembered):
            execution = await self._store.executions.get(execution_id)
        if execution is None:
            raise NotFound(f"No execution has the id {execution_id}.", code="execution_not_found")
        return await self._bulk.fetch(execution)

    async def look(self, execution_id: str, *, wait: float = 0.0) -> tuple[Execution, float | None]:
        """
        The execution, waited for as `wait` does, and while the database is away what is remembered
        of it with its age in seconds. To show, not to decide by.
        """
        recall = self._store.recent_executions.recall
        try:
            return await self.wait(execution_id, wait, remembered=recall(execution_id)), None
        except TemporaryError:
            remembered = recall(execution_id)
            if remembered is None:
                raise
            return await self._bulk.fetch(remembered.entity), remembered.age

    async def list(
        self,
        *,
        session_id: str,
        status: ExecutionStatus | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Execution]:
        """A page of records; of large ones only the beginning is in it."""
        await self._lives.session(session_id)
        page = await self._store.executions.page(
            session_id=session_id, status=status, cursor=cursor, limit=limit
        )
        items = tuple(
            self._under_way(item) if not item.status.ended else item for item in page.items
        )
        return dataclasses.replace(page, items=items)

    def _under_way(self, execution: Execution) -> Execution:
        """What is known here beyond the record, which says nothing until the end."""
        running = self._runs.get(execution.id)
        return execution if running is None else running.execution

    async def wait(
        self,
        execution_id: str,
        seconds: float,
        *,
        remembered: Remembered[Execution] | None = None,
    ) -> Execution:
        """The execution when it has ended, or as it is after so many seconds."""
        running = self._runs.get(execution_id)
        if running is not None:
            return await self.await_end(running, seconds)
        execution = await self.get(execution_id, remembered=remembered)
        seconds = min(seconds, self._settings.execution.max_wait.total_seconds())
        if execution.status.ended or seconds <= 0:
            return execution
        ended = await self._ends.within(execution_id, seconds)
        return execution if ended is None else await self._bulk.fetch(ended)

    async def await_end(self, running: Running, seconds: float) -> Execution:
        seconds = min(seconds, self._settings.execution.max_wait.total_seconds())
        if seconds > 0 and not running.done.done():
            await asyncio.wait([running.done], timeout=seconds)
        return running.execution

    async def cancel(self, execution_id: str) -> Execution:
        """End an execution: asked first, then made to. One that has ended stays as it ended."""
        running = self._runs.get(execution_id)
        if running is not None:
            await self._runs.cancel(running)
            await asyncio.wait([running.done], timeout=CANCEL_GRACE + 3)
            return running.execution
        execution = await self.get(execution_id)
        if not execution.status.ended:
            await self._coordination.cancel(execution_id, "user")
            execution = await self.wait(execution_id, CANCEL_GRACE + 3)
        return execution

    async def events(self, execution_id: str, after: int) -> AsyncIterator[tuple[int, str, Any]]:
        """
        What happens to an execution, each event with a number that is larger than the last one's,
        from behind the number `after` on; the last event is `result` with the execution.
        """
        heard = Heard(after)
        running = self._runs.get(execution_id)
        execution = await self.get(execution_id) if running is None else running.execution
        mirror = None
        if running is not None:
            running.listeners += 1
        elif not execution.status.ended:
            running = mirror = self._mirrors.join(execution)
        if running is None:
            for event in _replay(execution):
                if (told := heard.hear(*event)) is not None:
                    yield told
        else:
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
                if mirror is not None:
                    self._mirrors.leave(mirror)
                else:
                    running.listeners -= 1
            execution = running.execution
        if execution.outcome is not None and heard.end() > after:
            yield heard.end(), "result", execution


def _replay(execution: Execution) -> list[tuple[str, bytes]]:
    """The events of an execution that has ended, from its record: output whole, in two pieces."""
    outcome = execution.outcome
    events = [("started", b"")]
    if outcome is not None:
        events += [("stdout", outcome.stdout), ("stderr", outcome.stderr)]
    return events
