"""The stores under test. Another database is added as another parameter."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore
from tests.servers.databases import empty, migrate

from .store_entities import PATIENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.stores.base import Store
    from tests.servers.mariadb import MariaDB
    from tests.servers.postgres import PostgreSQL

    from .store_entities import OpenFile


QUICK_SQLITE = pytest.param("sqlite-file", marks=pytest.mark.quick)
BACKENDS = (QUICK_SQLITE, "mariadb", "postgresql")
on_sqlite = pytest.mark.parametrize("url", [QUICK_SQLITE], indirect=True)
"""For what no database decides."""
in_memory_too = pytest.mark.parametrize("url", [*BACKENDS, "sqlite-memory"], indirect=True)
"""SQLite in memory differs from a file in its connections alone."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """An empty database that has the schema, or makes it when it is opened."""
    match request.param:
        case "sqlite-file":
            return f"sqlite:///{path}"
        case "sqlite-memory":
            return "sqlite:///:memory:"
        case server:
            url: str = request.getfixturevalue(f"{server}_database")
            asyncio.run(empty(url))
            return url


@pytest.fixture(params=["mariadb", "postgresql"])
def server_url(request: pytest.FixtureRequest) -> str:
    """The same on servers only."""
    url: str = request.getfixturevalue(f"{request.param}_database")
    asyncio.run(empty(url))
    return url


@pytest.fixture(scope="session")
def mariadb_database(mariadb: MariaDB) -> str:
    url = mariadb.new_database()
    asyncio.run(migrate(url))
    return url


@pytest.fixture(scope="session")
def postgresql_database(postgresql: PostgreSQL) -> str:
    url = postgresql.new_database()
    asyncio.run(migrate(url))
    return url


@pytest.fixture
async def store(url: str, anyio_backend: str) -> AsyncIterator[Store]:
    store = SqlStore([url], sqlite=PATIENT, database=DatabaseSettings())
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database of a test is, when it is a file."""
    return tmp_path / "atoll.db"


@pytest.fixture
async def open_file(path: Path, anyio_backend: str) -> AsyncIterator[OpenFile]:
    """Opens the store in `path`, any number of times; closed after the test at the latest."""
    async with AsyncExitStack() as stack:

        async def open_file(settings: SqliteSettings | None = None) -> Store:
            store = SqlStore(
                [f"sqlite:///{path}"],
                sqlite=settings or PATIENT,
                database=DatabaseSettings(),
            )
            stack.push_async_callback(store.close)
            await store.open()
            return store

        yield open_file
