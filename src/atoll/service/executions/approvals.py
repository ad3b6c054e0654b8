"""
Questions that running code asks a person, and their answers.

The executor waits no longer than its own time-out, and answers with a refusal when the execution
ends, so code never hangs on a question. The replica that owns the execution publishes one question
after the other through coordination, where every replica can answer it, and passes the answer on. A
replica that takes the execution over receives the questions again, with the answers so far.
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
        """Questions without an answer, in order, by execution."""
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """The published question of each execution, and its task."""

    def question_changed(self, run: Run, question: dict[str, Any]) -> None:
        """A question was asked, answered or withdrawn."""
        execution_id, approval = run.id, str(question.get("id"))
        waiting = self._open.setdefault(execution_id, {})
        if question.get("state") == "asked":
            waiting[approval] = question
        else:
            waiting.pop(approval, None)
            asked, task = self._asking.get(execution_id, ("", None))
            if asked == approval and task is not None:
                task.cancel()
        self._next(run)

    def forget(self, run: Run) -> None:
        """The attempt is over: an answer would be taken for one to the next attempt's question."""
        self._open.pop(run.id, None)
        _, task = self._asking.pop(run.id, ("", None))
        if task is not None:
            task.cancel()

    def _next(self, run: Run) -> None:
        execution_id = run.id
        waiting = self._open.get(execution_id)
        if not waiting:
            self._open.pop(execution_id, None)
        elif execution_id not in self._asking:
            approval, line = next(iter(waiting.items()))
            work = self._ask(run, approval, line)
            task = self._background.start(work, f"ask {execution_id}", waits=True)
            self._asking[execution_id] = approval, task
            task.add_done_callback(lambda task: self._done(run, task))

    def _done(self, run: Run, task: asyncio.Task[None]) -> None:
        """A question was answered or withdrawn: publish the next one."""
        approval, asking = self._asking.get(run.id, ("", None))
        if asking is not task:
            return  # The attempt is over.
        del self._asking[run.id]
        self._open.get(run.id, {}).pop(approval, None)
        if not run.finished:
            self._next(run)

    async def _ask(self, run: Run, approval: str, line: dict[str, Any]) -> None:
        execution_id, timeout = run.id, float(line.get("timeout") or 0.0)
        backoff = Backoff()
        # The same words in another attempt are another question.
        question = {**line, "attempt": run.execution.retry_count + 1}
        while not run.finished:
            try:
                answer = await self._coordination.ask(execution_id, question, timeout=timeout)
                break
            except TemporaryError as error:
                # The executor counts the time, and refuses when it is over.
                log.warning("approval.waits", execution_id=execution_id, error=error.message)
                await backoff.pause()
            except TooLarge as error:
                # Encoded again it can be longer than it was.
                answer = {"approved": False, "answer": None, "reason": error.code}
                break
        else:
            return
        if answer is None or answer == SHUTDOWN:
            # Of this replica alone: the next owner receives the question again.
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
            # The execution is over, and the executor has refused the question.
            log.info("approval.not_delivered", execution_id=execution_id, error=error.message)

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        """The question that an execution waits for."""
        return await self._coordination.question(execution_id)

    async def resume(
        self, execution_id: str, answer: dict[str, Any], *, approval: str | None, status: str
    ) -> None:
        """Answer a question; `Conflict` with the execution's status if there is none."""
        asked = None
        if approval is not None:
            asked = await self._coordination.question(execution_id)
            if asked is None or str(asked.get("id")) != approval:
                raise _nothing_to_answer(execution_id, status)
        # Another question may have been published since.
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
