"""Opens the store that the settings name."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from atoll.app.data_directory import DataDirLock, make_data_dir
from atoll.stores.sql.dsn import Kind
from atoll.stores.sql.schema import Schema
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.settings import Settings


DATABASE = "atoll.db"


def database_urls(settings: Settings) -> tuple[str, ...]:
    return settings.database_urls or (
        settings.database_url or f"sqlite:///{settings.data_dir / DATABASE}",
    )


def names_database(settings: Settings) -> bool:
    return settings.database_url is not None or bool(settings.database_urls)


def open_store(settings: Settings) -> SqlStore:
    return SqlStore(database_urls(settings), sqlite=settings.sqlite, database=settings.database)


@asynccontextmanager
async def schema(settings: Settings, *, alone: bool = False) -> AsyncIterator[Schema]:
    """The schema of the database; `alone` refuses while a server uses the data directory."""
    found = Schema(database_urls(settings), sqlite=settings.sqlite, database=settings.database)
    if found.kind is not Kind.SQLITE:
        yield found
        return
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    if not alone:
        yield found
        return
    lock = await asyncio.to_thread(DataDirLock, settings.data_dir, shared=False)
    with contextlib.closing(lock):
        yield found
