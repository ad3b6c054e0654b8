"""The store: one engine, and one object for each noun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll import ids
from atoll.stores.sql.api_keys import SqlApiKeys
from atoll.stores.sql.checkpoints import SqlCheckpoints
from atoll.stores.sql.dsn import Address, Kind, addresses
from atoll.stores.sql.events import SqlEvents
from atoll.stores.sql.executions import SqlExecutions
from atoll.stores.sql.idempotency_records import SqlIdempotencyRecords
from atoll.stores.sql.instances import SqlInstances
from atoll.stores.sql.nodes import SqlNodes
from atoll.stores.sql.sessions import SqlSessions
from atoll.stores.sql.sqlite.engine import SqliteEngine
from atoll.stores.sql.templates import SqlTemplates
from atoll.stores.sql.volumes import SqlVolumes
from atoll.stores.sql.webhooks import SqlWebhooks
from atoll.stores.sql.writes import find_or_insert, insert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.settings import DatabaseSettings, SqliteSettings
    from atoll.stores.base import (
        ApiKeys,
        Checkpoints,
        Events,
        Executions,
        IdempotencyRecords,
        Instances,
        Nodes,
        Sessions,
        Templates,
        Volumes,
        Webhooks,
    )
    from atoll.stores.sql.engine import Connection, Engine

_PROPERTY = "SELECT value FROM properties WHERE name = :id"
_SET_PROPERTY = "INSERT INTO properties (name, value) VALUES (:id, :value)"
_PING = "SELECT version_num FROM alembic_version"


class SqlStore:
    """Implements `stores.base`; used by the event loop that opened it."""

    def __init__(
        self, urls: Sequence[str], *, sqlite: SqliteSettings, database: DatabaseSettings
    ) -> None:
        """`urls` are the addresses of one database (see `dsn`), in the order to try."""
        self._engine = _engine(addresses(urls), urls, sqlite, database)
        self.sessions: Sessions = SqlSessions(self._engine)
        self.executions: Executions = SqlExecutions(self._engine)
        self.instances: Instances = SqlInstances(self._engine)
        self.templates: Templates = SqlTemplates(self._engine)
        self.api_keys: ApiKeys = SqlApiKeys(self._engine)
        self.idempotency_records: IdempotencyRecords = SqlIdempotencyRecords(self._engine)
        self.checkpoints: Checkpoints = SqlCheckpoints(self._engine)
        self.volumes: Volumes = SqlVolumes(self._engine)
        self.nodes: Nodes = SqlNodes(self._engine)
        self.events: Events = SqlEvents(self._engine)
        self.webhooks: Webhooks = SqlWebhooks(self._engine)

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        """Waits for active writes."""
        await self._engine.close()

    async def cluster(self) -> str:
        return await self._property("cluster", ids.cluster_id())

    async def secret(self) -> str:
        return await self._property("secret", ids.secret())

    async def _property(self, name: str, value: str) -> str:
        """The property with this name; stores and returns `value` if there is none."""
        new = {"id": name, "value": value}

        def write(connection: Connection) -> str:
            found = connection.execute(_PROPERTY, new).fetchone()
            if found is None:
                insert(connection, _SET_PROPERTY, new, "Property")
                return new["value"]
            return str(found["value"])

        return await find_or_insert(self._engine, write)

    async def ping(self) -> None:
        await self._engine.read(lambda connection: connection.execute(_PING).fetchone())


def _engine(
    found: Sequence[Address],
    urls: Sequence[str],
    sqlite: SqliteSettings,
    database: DatabaseSettings,
) -> Engine:
    if found[0].kind is Kind.SQLITE:
        return SqliteEngine(found[0].name, sqlite)
    # Imported only here: loading SQLAlchemy takes longer than all else that a start does.
    from atoll.stores.sql.server.engine import ServerEngine

    return ServerEngine(urls, database)
