"""The back-ends under test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest

from tests.servers.redis import RedisServer

from .backend import LONG, Backend, memory_backend, redis_backend


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), password="a secret/word") as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis-cluster"), cluster=True) as server:
        yield server


@pytest.fixture
def presence() -> timedelta:
    """How long a replica of Redis counts as there; a test may have another."""
    return timedelta(seconds=LONG)


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.quick), "redis", "redis-cluster"])
async def backend(
    request: pytest.FixtureRequest, presence: timedelta, anyio_backend: str
) -> AsyncIterator[Backend]:
    if request.param == "memory":
        async with memory_backend() as memory:
            yield memory
        return
    fixture = {"redis": "redis_server", "redis-cluster": "redis_cluster"}[request.param]
    server: RedisServer = request.getfixturevalue(fixture)
    async with redis_backend(server.url, presence_ttl=presence) as redis:
        yield redis
