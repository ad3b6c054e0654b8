"""
Follows executions that another replica owns, for clients that stream their events from this one.

Output comes from the executor itself, which sends it to all who attach. The end comes from the
record, which the other replica writes. One follower serves all clients of an execution here; it
ends with the last of them, or with the execution.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.service.executions.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.model.execution import Execution
    from atoll.service.background import BackgroundTasks
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.sessions.access import SessionAccess
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

ATTACH_PAUSE = 1.0
"""Seconds before a follower that lost its link attaches again."""


class Followers:
    def __init__(
        self,
        sessions: SessionAccess,
        records: ExecutionRecords,
        background: BackgroundTasks,
        settings: ExecutionSettings,
    ) -> None:
        self._sessions = sessions
        self._records = records
        self._background = background
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self._clients: Counter[Run] = Counter()

    @contextlib.contextmanager
    def follow(self, execution: Execution) -> Iterator[Run]:
        """The execution as a run, which is followed inside the block."""
        run = self._runs.get(execution.id)
        if run is None:
            run = self._runs[execution.id] = Run(execution, self._settings)
            run.follow(self._follow(run), self._background)
        self._clients[run] += 1
        try:
            yield run
        finally:
            self._clients[run] -= 1
            if not self._clients[run]:
                del self._clients[run]
                run.detach()
                self._forget(run)

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    async def _follow(self, run: Run) -> None:
        attached = asyncio.ensure_future(self._attach(run))
        try:
            run.finish_from_record(await self._records.wait_for_end(run.execution))
        finally:
            attached.cancel()
            self._forget(run)
            # Also if the record is gone: no client may wait for ever.
            run.finish(run.execution)

    async def _attach(self, run: Run) -> None:
        """
        Receive output until the execution ends. After an instance was lost, the next attempt is
        followed in the instance that replaces it; the record has what is missed meanwhile.
        """
        while True:
            try:
                connection = await self._sessions.connections.reach(run.execution.session_id)
                if connection is not None:
                    intake = run.events.intake(requested=False)
                    await connection.link.attach(
                        run.id, run.events.sequence, run, intake, expected=True
                    )
                    return
            except AtollError as error:
                log.debug("follower.lost", execution_id=run.id, error=error.message)
            await asyncio.sleep(ATTACH_PAUSE)
            stored = await self._records.get(run.id)
            if stored is None or stored.status.ended:
                return
            if stored.retry_count > run.execution.retry_count:
                failed = stored.attempts[-1] if stored.attempts else None
                run.next_attempt(stored, {"cause": None if failed is None else failed.cause})
