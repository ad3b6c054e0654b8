"""The store as the rest of Atoll sees it: one engine, one face for each noun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.stores.sql.engine import Engine
from atoll.stores.sql.executions import SqlExecutions
from atoll.stores.sql.instances import SqlInstances
from atoll.stores.sql.keys import SqlKeys
from atoll.stores.sql.sessions import SqlSessions
from atoll.stores.sql.templates import SqlTemplates

if TYPE_CHECKING:
    from atoll.settings import SqliteSettings
    from atoll.stores.base import Executions, Instances, Keys, Sessions, Templates

_PING = "SELECT version_num FROM alembic_version"


class SqlStore:
    """Keeps the contract of `stores.base`, on the event loop that opened it."""

    def __init__(self, url: str, settings: SqliteSettings) -> None:
        """`url` is `sqlite:///file`, `sqlite:////path/to/file` or `sqlite:///:memory:`."""
        self._engine = Engine(url, settings)
        self.sessions: Sessions = SqlSessions(self._engine)
        self.executions: Executions = SqlExecutions(self._engine)
        self.instances: Instances = SqlInstances(self._engine)
        self.templates: Templates = SqlTemplates(self._engine)
        self.keys: Keys = SqlKeys(self._engine)

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        """Waits for the writes that are under way."""
        await self._engine.close()

    async def ping(self) -> None:
        await self._engine.read(lambda connection: connection.execute(_PING).fetchone())
