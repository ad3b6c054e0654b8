"""
Commits results: the second of the two commits of an execution.

The result is stored by compare-and-set before any client learns of it, and acknowledged to the
executor after the commit: a replica that dies in between leaves the result in the executor's
journal, where its successor finds it. A replica that has lost the execution to another is refused
by the record's version.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from atoll.model.execution import ExecutionStatus
from atoll.model.outcome import without_result
from atoll.model.session import Cause

if TYPE_CHECKING:
    from atoll.model.execution import Execution, Outcome
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.executions.run import Run
    from atoll.service.replica import Replica
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.connections import Connections


class ResultCommit:
    def __init__(
        self,
        replica: Replica,
        records: ExecutionRecords,
        connections: Connections,
        autosave: Autosave,
        approvals: Approvals,
    ) -> None:
        self._replica = replica
        self._records = records
        self._connections = connections
        self._autosave = autosave
        self._approvals = approvals
        self.finished: Counter[str] = Counter()
        """Executions that have ended here, by status."""
        self.seconds = 0.0
        """How long they took together."""

    async def commit(self, run: Run, outcome: Outcome) -> None:
        """
        Store the result of a run, however long that takes, and acknowledge it. The caller announces
        the end when it has given the lease back: what waits for it may use the session at once.
        """
        run.committing()
        outcome = run.events.with_log(outcome)
        now = self._replica.clock.now()
        ended = run.execution.ended(outcome, at=now, node_id=self._replica.node_id)
        stored = await self._records.store_result(ended)
        self.finish(run, stored, own=stored.outcome is outcome)

    def finish(self, run: Run, stored: Execution, *, own: bool) -> None:
        """Finish a run whose result is stored; `own` unless another replica was faster."""
        connection = self._connections.reachable(stored.session_id)
        if connection is not None:
            connection.link.acknowledge(stored.id)
        self.finished[stored.status] += 1
        if stored.outcome is not None:
            self.seconds += stored.outcome.execution_time
        if own:
            run.finish(stored)
        else:
            run.finish_from_record(stored)
        self._approvals.forget(run)

    async def secure(self, execution: Execution, outcome: Outcome) -> Outcome:
        """
        With durability `execution`, the files are stored before the result. If they were lost with
        their instance, the outcome of an attempt that has succeeded is that of a lost one.
        """
        kept = await self._autosave.before_result(execution.session_id, execution.instance_id)
        if kept or outcome.status is not ExecutionStatus.COMPLETED:
            return outcome
        return without_result(
            ExecutionStatus.CRASHED,
            Cause.INSTANCE_LOST,
            "The instance was lost before the files of the execution were stored.",
            stdout=outcome.stdout,
            stderr=outcome.stderr,
        )
