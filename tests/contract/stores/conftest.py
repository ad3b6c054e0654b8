"""The stores that the contract is held against. Another database joins with another parameter."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from atoll.settings import SqliteSettings
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.stores.base import Store

    from .store_entities import OpenFile


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sqlite-file", "sqlite-memory"])
async def store(
    request: pytest.FixtureRequest, path: Path, anyio_backend: str
) -> AsyncIterator[Store]:
    urls = {"sqlite-file": f"sqlite:///{path}", "sqlite-memory": "sqlite:///:memory:"}
    store = SqlStore(urls[request.param], SqliteSettings())
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database of a test is, when it is a file."""
    return tmp_path / "atoll.db"


@pytest.fixture
async def open_file(path: Path, anyio_backend: str) -> AsyncIterator[OpenFile]:
    """Opens the store in `path`, as often as it is called; closed after the test if not before."""
    async with AsyncExitStack() as stack:

        async def open_file(settings: SqliteSettings | None = None) -> Store:
            store = SqlStore(f"sqlite:///{path}", settings or SqliteSettings())
            stack.push_async_callback(store.close)
            await store.open()
            return store

        yield open_file
