"""
Questions that running code puts to a person, and the answers.

The executor asks, waits no longer than its own time-out, and refuses when the execution ends, so
code never hangs on a question whatever becomes of us. The replica that sees to the execution puts
one question after the other where every replica can answer it, and passes the answer on. One that
takes the execution over hears the questions again, with what became of them, and goes on from
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from atoll.coordination.base import SHUTDOWN
from atoll.errors import AtollError, Conflict, TemporaryError, TooLarge
from atoll.service.backoff import Backoff

if TYPE_CHECKING:
    import asyncio

    from atoll.service.executions.run import Run
    from atoll.service.replica import Replica
    from atoll.service.sessions.access import SessionAccess

log = structlog.get_logger(__name__)


class Approvals:
    def __init__(
        self,
        replica: Replica,
        sessions: SessionAccess,
    ) -> None:
        self._coordination = replica.coordination
        self._background = replica.background
        self._sessions = sessions
        self._open: dict[str, dict[str, dict[str, Any]]] = {}
        """By execution, the questions without an answer, in order."""
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By execution, the question that is being put, and its task."""

    def hear(self, run: Run, line: dict[str, Any]) -> None:
        """A question was asked, or is settled."""
        execution_id, approval = run.execution.id, str(line.get("id"))
        waiting = self._open.setdefault(execution_id, {})
        if line.get("state") == "asked":
            waiting[approval] = line
        else:
            waiting.pop(approval, None)
            asked, task = self._asking.get(execution_id, ("", None))
            if asked == approval and task is not None:
                task.cancel()
        self._next(run)

    def forget(self, run: Run) -> None:
        """Who asked is gone: an answer would be taken for one to what the next attempt asks."""
        self._open.pop(run.execution.id, None)
        _, task = self._asking.pop(run.execution.id, ("", None))
        if task is not None:
            task.cancel()

    def _next(self, run: Run) -> None:
        execution_id = run.execution.id
        waiting = self._open.get(execution_id)
        if not waiting:
            self._open.pop(execution_id, None)
        elif execution_id not in self._asking:
            approval, line = next(iter(waiting.items()))
            work = self._ask(run, approval, line)
            task = self._background.start(work, f"ask {execution_id}", waits=True)
            self._asking[execution_id] = approval, task
            task.add_done_callback(lambda task: self._put(run, task))

    def _put(self, run: Run, task: asyncio.Task[None]) -> None:
        """A question is out of the way, answered or not."""
        approval, asking = self._asking.get(run.execution.id, ("", None))
        if asking is not task:
            return  # Forgotten.
        del self._asking[run.execution.id]
        self._open.get(run.execution.id, {}).pop(approval, None)
        if not run.done.done():
            self._next(run)

    async def _ask(self, run: Run, approval: str, line: dict[str, Any]) -> None:
        execution_id, timeout = run.execution.id, float(line.get("timeout") or 0.0)
        backoff = Backoff()
        # Another attempt asks anew, though in the same words.
        question = {**line, "attempt": run.execution.retry_count + 1}
        while not run.done.done():
            try:
                answer = await self._coordination.ask(execution_id, question, timeout=timeout)
                break
            except TemporaryError as error:
                # The executor counts the time; who asks is refused when it is over.
                log.warning("approval.waits", execution_id=execution_id, error=error.message)
                await backoff.pause()
            except TooLarge as error:
                # Written anew it can be longer than it was: nobody can be asked that.
                answer = {"approved": False, "answer": None, "reason": error.code}
                break
        else:
            return
        if answer is None or answer == SHUTDOWN:
            # Of this replica alone: the next one hears the question again.
            return
        connection = self._sessions.connections.reachable(run.execution.session_id)
        try:
            if connection is None:
                connection = await self._sessions.connections.reach(run.execution.session_id)
            if connection is not None:
                await connection.link.call(
                    "answer", id=execution_id, approval=approval, answer=answer
                )
        except AtollError as error:
            # Over meanwhile: whoever asked was told so by the executor.
            log.info("approval.unheard", execution_id=execution_id, error=error.message)

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        """What an execution waits to be told."""
        return await self._coordination.question(execution_id)

    async def resume(
        self, execution_id: str, answer: dict[str, Any], *, approval: str | None, status: str
    ) -> None:
        """Answer; `Conflict` with the execution's status when there is nothing to answer."""
        asked = None
        if approval is not None:
            asked = await self._coordination.question(execution_id)
            if asked is None or str(asked.get("id")) != approval:
                raise _nothing_to_answer(execution_id, status)
        # What is asked may have changed since.
        resolution = await self._coordination.resolve(execution_id, answer, question=asked)
        if resolution == "gone":
            raise _nothing_to_answer(execution_id, status)
        if resolution == "already":
            raise Conflict(
                f"The question of execution {execution_id} was answered already.",
                code="already_answered",
                status_now=status,
            )


def _nothing_to_answer(execution_id: str, status: str) -> Conflict:
    return Conflict(
        f"Execution {execution_id} does not wait for this answer.",
        code="no_approval",
        status_now=status,
    )
