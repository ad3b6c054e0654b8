from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.sdk.client import AsyncAtoll
from atoll.sdk.sync import Atoll
from tests.component.sdk.fake_server import KEY, FakeServer, ServerThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_URL", "ATOLL_API_KEY", "ATOLL_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake_server = FakeServer()
    with ServerThread(fake_server):
        yield fake_server


@pytest.fixture
def atoll(fake_server: FakeServer) -> Iterator[Atoll]:
    with Atoll(fake_server.url, api_key=KEY) as atoll:
        yield atoll


@pytest.fixture
async def async_atoll(fake_server: FakeServer) -> AsyncIterator[AsyncAtoll]:
    async with AsyncAtoll(fake_server.url, api_key=KEY) as atoll:
        yield atoll
