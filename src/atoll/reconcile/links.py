"""
Keeps a link to every running session of this node, including idle ones.

Executors end instances that have had no server connected for `link.unattended_limit`. Without this
loop, only the next request for a session would connect to it after a restart or a lost link.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError
from atoll.reconcile.concurrency import for_each
from atoll.reconcile.sweep import exclusively, sweep

if TYPE_CHECKING:
    from atoll.service.replica import Replica
    from atoll.service.sessions.connections import Connections
    from atoll.settings import LinkSettings

CONCURRENCY = 8
ROUNDS = 4
"""Rounds within the time after which executors end their instances."""

log = structlog.get_logger(__name__)


class SessionLinks:
    def __init__(self, replica: Replica, connections: Connections, settings: LinkSettings) -> None:
        self._store = replica.store
        self._leases = replica.leases
        self._node_id = replica.node_id
        self._connections = connections
        self._interval = settings.unattended_limit.total_seconds() / ROUNDS

    async def run(self) -> None:
        turn = partial(exclusively, self._leases, f"attendance:{self._node_id}", self.once)
        await sweep("attendance.failed", self._interval, turn, at_once=True)

    async def once(self) -> None:
        here = [
            instance.session_id
            for instance in await self._store.instances.all()
            if instance.node_id == self._node_id and instance.session_id is not None
        ]
        await for_each(here, self._reach, at_once=CONCURRENCY)

    async def _reach(self, session_id: str) -> None:
        if self._connections.reachable(session_id) is not None:
            return
        try:
            await self._connections.reach(session_id)
        except AtollError as error:
            # It is paused or ended, or its instance does not answer: other loops handle that.
            log.info("session.not_reached", session_id=session_id, error=error.message)
