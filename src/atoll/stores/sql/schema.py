"""Reads and changes the schema of a database of any kind, for `atoll db`."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.stores.sql import revisions
from atoll.stores.sql.dsn import MEMORY, Kind, addresses
from atoll.stores.sql.sqlite.engine import create_file, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from sqlalchemy import Connection

    from atoll.settings import DatabaseSettings, SqliteSettings

    T = TypeVar("T")


class Schema:
    """Connects for each call. Calls must not overlap."""

    def __init__(
        self, urls: Sequence[str], *, sqlite: SqliteSettings, database: DatabaseSettings
    ) -> None:
        first, *_ = addresses(urls)
        self.kind = first.kind
        self.name = first.name
        """For messages: the file, or host and port."""
        self._urls = urls
        self._sqlite = sqlite
        self._database = database

    async def revision(self) -> str | None:
        """The revision of the database; None if it has no schema yet."""
        if self.kind is not Kind.SQLITE:
            return await self._on_server(revisions.revision_of)
        if self.name == MEMORY or not await asyncio.to_thread(Path(self.name).exists):
            return None
        return await asyncio.to_thread(self._on_file, revisions.sqlite_revision) or None

    async def upgrade(self, revision: str = "head") -> None:
        from atoll.stores.sql import migrations

        await self._change(partial(migrations.upgrade, revision=revision))

    async def downgrade(self, revision: str) -> None:
        from atoll.stores.sql import migrations

        await self._change(partial(migrations.downgrade, revision=revision))

    async def _change(self, change: Callable[[sqlite3.Connection | Connection], None]) -> None:
        if self.kind is Kind.SQLITE:
            await asyncio.to_thread(self._on_file, change)
        else:
            await self._on_server(change)

    async def _on_server(self, work: Callable[[Connection], T]) -> T:
        from atoll.stores.sql.server.connect import make_engine

        engine = make_engine(self._urls, self._database)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(work)
        finally:
            await engine.dispose()

    def _on_file(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self.name != MEMORY:
                create_file(Path(self.name))
            with closing(
                sqlite3.connect(
                    self.name,
                    timeout=self._sqlite.busy_timeout.total_seconds(),
                    isolation_level=None,
                )
            ) as connection:
                return work(connection)
        except (sqlite3.Error, OSError) as error:
            raise translate(error, self.name) from error
