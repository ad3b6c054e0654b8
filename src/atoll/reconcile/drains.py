"""
Sessions leave a node that is drained, a few at a time.

The node's own control planes see to it, because only they reach its instances; one of them at a
time. A session is given some time to be done with what runs in it. Then its files are saved, its
instance ends, and it goes on elsewhere. One that cannot leave is told of in the drain's message and
tried again, until it can, has ended, or the node is uncordoned.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.model.execution import ExecutionStatus
from atoll.model.session import Cause
from atoll.reconcile.sweep import exclusively, sweep_on_notify
from atoll.service.nodes.service import node_topic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.model.node import Node
    from atoll.model.session import Session
    from atoll.service.executions.runner import Runner
    from atoll.service.nodes.migration import Migrations
    from atoll.service.nodes.service import Nodes
    from atoll.service.placement.service import Placement
    from atoll.service.replica import Replica
    from atoll.settings import NodeSettings

log = structlog.get_logger(__name__)

BATCH = 50
BUSY_SECONDS = 0.5
"""Time between two looks at what other control planes of this node run in a session."""
LONGEST = 300
"""Characters of a message."""
UNDER_WAY = (ExecutionStatus.PENDING, ExecutionStatus.RUNNING)

CONCURRENCY = 3
"""Sessions that leave a draining node at the same time."""


class DrainReconciler:
    def __init__(
        self,
        replica: Replica,
        nodes: Nodes,
        placement: Placement,
        migrations: Migrations,
        runner: Runner,
        settings: NodeSettings,
        leave: Callable[[str, Node], Awaitable[Session]],
    ) -> None:
        """`leave` saves a session, assigns it to another node, and removes its instance here."""
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._nodes = nodes
        self._placement = placement
        self._migrations = migrations
        self._runner = runner
        self._settings = settings
        self._leave = leave
        self._interval = settings.probe.total_seconds()

    async def run(self) -> None:
        turn = partial(exclusively, self._leases, f"drain:{self._nodes.id}", self.once)
        topic = node_topic(self._nodes.id)
        await sweep_on_notify("drain.failed", self._coordination, topic, self._interval, turn)

    async def once(self) -> None:
        """Let every session leave that can, while the node is to be emptied."""
        if not await self._is_on():
            return
        emptied = _Emptied()
        slots = asyncio.Semaphore(CONCURRENCY)
        after = ""
        while batch := await self._store.sessions.unfinished(
            limit=BATCH, after=after, node_id=self._nodes.id
        ):
            async with asyncio.TaskGroup() as group:
                for session in batch:
                    group.create_task(self._left(session, slots, emptied))
            after = batch[-1].id
            if not await self._is_on():
                return
        await self._nodes.update_drain(self._nodes.id, emptied.message)

    async def _is_on(self) -> bool:
        node = await self._store.nodes.get(self._nodes.id)
        return node is not None and node.drain is not None

    async def _left(self, session: Session, slots: asyncio.Semaphore, emptied: _Emptied) -> None:
        if session.instance_id is not None:
            await self._idle(session.id)
        async with slots:
            if not await self._is_on():
                return
            try:
                await self._go(session)
            except AtollError as error:
                log.warning("drain.session_stays", session_id=session.id, error=error.message)
                emptied.message = error.message[:LONGEST]
                return
            except Exception as error:
                log.error("drain.session_stays", session_id=session.id, exc_info=error)
                emptied.message = f"Session {session.id} could not leave; the log says why."
                return
            await self._nodes.update_drain(self._nodes.id, emptied.message)

    async def _go(self, session: Session) -> None:
        # Before anything is ended: it stays as it is when it has nowhere to go.
        target = await self._placement.assign(session)
        under_way = await self._runner.release_runs(session.id)
        try:
            left = await self._leave(session.id, target)
        finally:
            await self._runner.hand_over(under_way)
        if left.runtime_node == target.id:
            self._migrations.count(Cause.EVICTED)

    async def _idle(self, session_id: str) -> None:
        """Until nothing runs in it, or it had time enough."""
        try:
            async with asyncio.timeout(self._settings.drain_grace.total_seconds()):
                while await self._is_on():
                    if runs := self._runner.runs_of(session_id):
                        await runs[0].wait(self._interval)
                    elif await self._is_busy(session_id):
                        await asyncio.sleep(BUSY_SECONDS)
                    else:
                        return
        except TimeoutError:
            log.info("drain.cut_short", session_id=session_id)

    async def _is_busy(self, session_id: str) -> bool:
        """Whether something is under way in it, by whichever control plane."""
        for status in UNDER_WAY:
            page = await self._store.executions.page(session_id=session_id, status=status, limit=1)
            if page.items:
                return True
        return False


class _Emptied:
    def __init__(self) -> None:
        self.message: str | None = None
        """Why one could not leave."""
