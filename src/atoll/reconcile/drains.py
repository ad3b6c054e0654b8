"""
Moves sessions away from a node that is drained, a few at a time.

A replica of the node itself does so, one at a time, because only its replicas reach its instances.
A session gets some time to finish its executions. Then a checkpoint is taken, its instance ends,
and it continues on another node. The drain's message names a session that cannot leave; it is
retried until it leaves or ends, or the node is uncordoned.
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
BUSY_INTERVAL = 0.5
"""Seconds between two checks whether other replicas of this node run something in a session."""
MAX_MESSAGE = 300
"""Characters of the drain's message."""
UNFINISHED = (ExecutionStatus.PENDING, ExecutionStatus.RUNNING)

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
        """Move every session that can leave, while the node is draining."""
        if not await self._is_draining():
            return
        progress = _Progress()
        slots = asyncio.Semaphore(CONCURRENCY)
        after = ""
        while batch := await self._store.sessions.unfinished(
            limit=BATCH, after=after, node_id=self._nodes.id
        ):
            async with asyncio.TaskGroup() as group:
                for session in batch:
                    group.create_task(self._evacuate(session, slots, progress))
            after = batch[-1].id
            if not await self._is_draining():
                return
        await self._nodes.update_drain(self._nodes.id, progress.message)

    async def _is_draining(self) -> bool:
        node = await self._store.nodes.get(self._nodes.id)
        return node is not None and node.drain is not None

    async def _evacuate(
        self, session: Session, slots: asyncio.Semaphore, progress: _Progress
    ) -> None:
        if session.instance_id is not None:
            await self._wait_until_idle(session.id)
        async with slots:
            if not await self._is_draining():
                return
            try:
                await self._move(session)
            except AtollError as error:
                log.warning("drain.session_stays", session_id=session.id, error=error.message)
                progress.message = error.message[:MAX_MESSAGE]
                return
            except Exception as error:
                log.error("drain.session_stays", session_id=session.id, exc_info=error)
                progress.message = f"Session {session.id} could not leave. See the server log."
                return
            await self._nodes.update_drain(self._nodes.id, progress.message)

    async def _move(self, session: Session) -> None:
        # First: a session that fits on no other node must not be interrupted.
        target = await self._placement.assign(session)
        under_way = await self._runner.release_runs(session.id)
        try:
            moved = await self._leave(session.id, target)
        finally:
            await self._runner.hand_over(under_way)
        if moved.runtime_node == target.id:
            self._migrations.count(Cause.EVICTED)

    async def _wait_until_idle(self, session_id: str) -> None:
        """Wait until nothing runs in the session, at most for the grace period."""
        try:
            async with asyncio.timeout(self._settings.drain_grace.total_seconds()):
                while await self._is_draining():
                    if runs := self._runner.runs_of(session_id):
                        await runs[0].wait(self._interval)
                    elif await self._is_busy(session_id):
                        await asyncio.sleep(BUSY_INTERVAL)
                    else:
                        return
        except TimeoutError:
            log.info("drain.cut_short", session_id=session_id)

    async def _is_busy(self, session_id: str) -> bool:
        """Whether any replica runs something in the session."""
        for status in UNFINISHED:
            page = await self._store.executions.page(session_id=session_id, status=status, limit=1)
            if page.items:
                return True
        return False


class _Progress:
    def __init__(self) -> None:
        self.message: str | None = None
        """Why a session could not leave."""
