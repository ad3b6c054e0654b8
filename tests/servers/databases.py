"""Databases on the tests' servers: given the schema, and emptied again."""

from __future__ import annotations

from sqlalchemy import delete

from atoll.settings import DatabaseSettings
from atoll.stores.sql import migrations
from atoll.stores.sql.metadata import metadata
from atoll.stores.sql.server.connect import make_engine


async def migrate(url: str) -> None:
    engine = make_engine([url], DatabaseSettings())
    async with engine.connect() as connection:
        await connection.run_sync(migrations.upgrade)
    await engine.dispose()


async def empty(url: str) -> None:
    engine = make_engine([url], DatabaseSettings())
    async with engine.begin() as connection:
        for table in metadata.tables.values():
            await connection.execute(delete(table))
    await engine.dispose()
