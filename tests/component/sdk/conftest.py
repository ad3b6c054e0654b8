from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.sdk.client import AsyncAtoll
from atoll.sdk.sync import Atoll
from tests.component.sdk.outside import KEY, Outside, ServerThread

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
def outside() -> Iterator[Outside]:
    outside = Outside()
    with ServerThread(outside):
        yield outside


@pytest.fixture
def atoll(outside: Outside) -> Iterator[Atoll]:
    with Atoll(outside.url, api_key=KEY) as atoll:
        yield atoll


@pytest.fixture
async def async_atoll(outside: Outside) -> AsyncIterator[AsyncAtoll]:
    async with AsyncAtoll(outside.url, api_key=KEY) as atoll:
        yield atoll
