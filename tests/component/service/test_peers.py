"""Other nodes are found even without notifications."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import CoordinationUnavailable
from atoll.model.node import Node
from atoll.service.nodes.forward_token import MAX_CLOCK_SKEW, ForwardTokens
from atoll.service.nodes.peers import Peers
from atoll.service.nodes.replay_guard import ReplayGuard
from atoll.settings import NodeSettings
from tests.parts import ME, NODE, parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.coordination.base import Subscription

pytestmark = pytest.mark.anyio


class Deaf(MemoryCoordination):
    """One whose connection is lost at first."""

    refused = 0

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Subscription]:
        if self.refused < 2:
            self.refused += 1
            raise CoordinationUnavailable("The connection is lost.")
        async with super().listen(topic) as listener:
            yield listener


async def test_a_new_node_is_found_without_notifications(tmp_path: Path) -> None:
    clock = SystemClock()
    async with parts(tmp_path, clock) as found:
        settings = found.settings
        deaf = Deaf(ME, settings.coordination, timedelta(hours=1), clock)
        given = NodeSettings(probe=timedelta(seconds=0.05))
        guard = ReplayGuard(tmp_path / "nonces", MAX_CLOCK_SKEW)
        tokens = ForwardTokens("secret", NODE, clock, guard)
        peers = Peers(replace(found.replica, coordination=deaf), given, tokens)
        running = asyncio.create_task(peers.run())
        try:
            while deaf.refused < 2:
                await asyncio.wait([running], timeout=0.01)
                assert not running.done()
            await found.store.nodes.report(Node("another", "local", "http://another"))
            async with asyncio.timeout(20):
                while peers.alone:
                    await asyncio.wait([running], timeout=0.01)
                    assert not running.done()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await peers.close()
