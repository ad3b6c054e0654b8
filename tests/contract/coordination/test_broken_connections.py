"""A connection to Redis that breaks at any step of a command is a `TemporaryError`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll import ids
from atoll.coordination.redis import RedisCoordination
from atoll.errors import TemporaryError
from atoll.settings import CoordinationSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.servers.redis import RedisServer

pytestmark = pytest.mark.anyio

STEPS = 12
"""Turns of the loop in which a subscription has been sent for long."""


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


async def _lost(wire: Any) -> None:
    """As its reader does when the server is gone."""
    await wire.disconnect(nowait=True)


async def _reset(wire: Any) -> None:
    """Reset by the server, and not noticed yet."""
    wire._writer.transport.abort()


BREAKS = [_lost, _reset]


async def listens(coordination: RedisCoordination, topic: str) -> None:
    async with coordination.listen(topic):
        pass


@pytest.mark.parametrize("breaks", BREAKS)
async def test_starting_or_stopping_to_listen_fails_while_redis_is_unavailable(
    redis_server: RedisServer, breaks: Callable[[Any], Awaitable[None]]
) -> None:
    long = timedelta(seconds=10)
    settings = CoordinationSettings(
        prefix=ids.replica_id(), read_timeout=long, connect_timeout=long
    )
    for steps in range(STEPS):
        coordination = RedisCoordination(
            ids.replica_id(), redis_server.url, settings, timedelta(minutes=1)
        )
        await coordination.open()
        try:
            wire = coordination._listener._wire
            listening = asyncio.create_task(listens(coordination, "news"))
            for _ in range(steps):
                await asyncio.sleep(0)
            await breaks(wire)
            await asyncio.wait([listening])
            error = listening.exception()
            assert error is None or isinstance(error, TemporaryError), (steps, error)
        finally:
            await coordination.close()
