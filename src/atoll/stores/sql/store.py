"""The store as the rest of Atoll sees it: one engine, one face for each noun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll import ids
from atoll.stores.sql.engine import Engine
from atoll.stores.sql.executions import SqlExecutions
from atoll.stores.sql.instances import SqlInstances
from atoll.stores.sql.keys import SqlKeys
from atoll.stores.sql.requests import SqlKeyedRequests
from atoll.stores.sql.sessions import SqlSessions
from atoll.stores.sql.templates import SqlTemplates

if TYPE_CHECKING:
    import sqlite3

    from atoll.settings import SqliteSettings
    from atoll.stores.base import Executions, Instances, KeyedRequests, Keys, Sessions, Templates

_PROPERTY = "SELECT value FROM properties WHERE name = :name"
_SET_PROPERTY = "INSERT INTO properties (name, value) VALUES (:name, :value)"
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
        self.requests: KeyedRequests = SqlKeyedRequests(self._engine)

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        """Waits for the writes that are under way."""
        await self._engine.close()

    async def cluster(self) -> str:
        """An id of this database, made when it is first asked for and the same for all."""
        new = {"name": "cluster", "value": ids.cluster_id()}

        def write(connection: sqlite3.Connection) -> str:
            found = connection.execute(_PROPERTY, new).fetchone()
            if found is None:
                connection.execute(_SET_PROPERTY, new)
                return new["value"]
            return str(found["value"])

        return await self._engine.write(write)

    async def ping(self) -> None:
        await self._engine.read(lambda connection: connection.execute(_PING).fetchone())
