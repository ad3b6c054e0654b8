"""
The connection pool for MariaDB and PostgreSQL.

A new connection goes to the first address that answers, in the given order: a secondary serves
while the primary does not answer, and not for connections made after it is back. A connection that
was idle is checked before it is used; if the check fails, all older connections are discarded too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from atoll.stores.sql.dsn import Address, Kind, addresses
from atoll.stores.sql.server.errors import ConnectionFailed, message_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from atoll.settings import DatabaseSettings

DIALECTS = {Kind.MARIADB: "mysql+aiomysql://", Kind.POSTGRESQL: "postgresql+asyncpg://"}

DriverCall = Callable[[Any], Awaitable[object]]
PING: Mapping[Kind, DriverCall] = {
    Kind.MARIADB: lambda driver: driver.ping(reconnect=False),
    Kind.POSTGRESQL: lambda driver: driver.execute("SELECT 1"),
}
TRUSTED = 1.0
"""Seconds after its last use in which a connection is not checked: a check costs a round trip."""
CLOSE_TIMEOUT = 1.0

# However the server is configured: text that does not fit is an error and never truncated.
SQL_MODE = "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'"


def make_engine(urls: Sequence[str], settings: DatabaseSettings) -> AsyncEngine:
    """An engine for one database with several addresses. It connects when it is first used."""
    found = addresses(urls)
    kind = found[0].kind
    engine = create_async_engine(
        DIALECTS[kind],
        async_creator=partial(connect_first, found, settings.connect_timeout),
        # Sets `autocommit` as well, overriding the URL.
        isolation_level="READ COMMITTED",
        pool_size=settings.pool_size,
        max_overflow=settings.max_overflow,
        pool_timeout=settings.pool_timeout.total_seconds(),
        pool_recycle=int(settings.pool_recycle.total_seconds()),
        # The connection used last has prepared statements, and needs no check.
        pool_use_lifo=True,
        # Values that users wrote do not belong in logs.
        hide_parameters=True,
        # Transactions are ended by our own code; another ROLLBACK would cost a round trip.
        pool_reset_on_return=None,
    )
    if settings.pre_ping:
        # SQLAlchemy's own check waits forever if a host is silent.
        check = IdleCheck(PING[kind], settings.connect_timeout)
        sa.event.listen(engine.sync_engine, "checkin", check.returned)
        sa.event.listen(engine.sync_engine, "invalidate", check.failed)
        sa.event.listen(engine.sync_engine, "checkout", check)
    # Nor does SQLAlchemy limit the time that closing takes.
    sa.event.listen(engine.sync_engine, "close", partial(_close, CLOSE[kind]))
    return engine


async def connect_first(found: Sequence[Address], timeout: timedelta) -> Any:
    """The driver's connection to the first address that answers, each within `timeout`."""
    failures: list[str] = []
    for address in found:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                return await _CONNECT[address.kind](address)
        except TimeoutError:
            failures.append(f"{address.name}: no answer within {timeout.total_seconds():g} s")
        except Exception as error:  # noqa: BLE001 drivers raise anything, and the next address may answer
            failures.append(f"{address.name}: {message_of(error)}")
    raise ConnectionFailed(f"The database cannot be reached ({'; '.join(failures)}).")


async def _connect_mariadb(address: Address) -> Any:
    import aiomysql
    from pymysql.constants import CLIENT

    class Connection(aiomysql.Connection):  # type: ignore[misc]
        async def _request_authentication(self) -> None:
            # The driver would continue without TLS and send the password to any server.
            if self._ssl_context and not self.server_capabilities & CLIENT.SSL:
                raise ConnectionError("the server offers no TLS")
            await super()._request_authentication()

        def is_closed(self) -> bool:
            """Whether an end of the connection has arrived, as with asyncpg."""
            reader = self._reader
            return reader is None or reader.at_eof() or reader.exception() is not None

        def close(self) -> None:
            # The driver's own close, also used when a caller is cancelled, waits until the buffer
            # is sent and, with TLS, until the server has closed as well.
            if self._writer is not None:
                self._writer.transport.abort()
            super().close()

    given = {"charset": "utf8mb4", "sql_mode": SQL_MODE, **address.arguments}
    # Count the rows that matched, not those that changed, as the other databases do.
    connection = Connection(client_flag=CLIENT.FOUND_ROWS, **given)
    try:
        await connection._connect()
    except BaseException:
        # `aiomysql.connect` would leave a connection open that took too long.
        abort(connection)
        raise
    return connection


async def _connect_postgresql(address: Address) -> Any:
    import asyncpg

    return await asyncpg.connect(**address.arguments)


_CONNECT = {Kind.MARIADB: _connect_mariadb, Kind.POSTGRESQL: _connect_postgresql}


class IdleCheck:
    """
    Pings connections before they are used, except new ones and those that were used just now:
    unless their end has arrived, or another one has failed since.
    """

    def __init__(self, ping: DriverCall, timeout: timedelta) -> None:
        self._ping = ping
        self._timeout = timeout
        self._failed_at = -math.inf

    def returned(self, _connection: Any, record: Any) -> None:
        record.info["returned_at"] = time.monotonic()

    def failed(self, _connection: Any, _record: Any, _error: Any) -> None:
        self._failed_at = time.monotonic()

    def __call__(self, connection: Any, record: Any, _proxy: Any) -> None:
        trusted_since = max(self._failed_at, time.monotonic() - TRUSTED)
        if (
            record.info.get("returned_at", math.inf) <= trusted_since
            or connection.driver_connection.is_closed()
        ):
            connection.run_async(self._check)

    async def _check(self, driver: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                await self._ping(driver)
        except Exception as error:
            abort(driver)
            raise sa.exc.InvalidatePoolError from error
        except BaseException:
            abort(driver)
            raise


CLOSE: Mapping[Kind, DriverCall] = {
    Kind.MARIADB: lambda driver: driver.ensure_closed(),
    Kind.POSTGRESQL: lambda driver: driver.close(),
}


def _close(close: DriverCall, connection: Any, _record: Any) -> None:
    async def close_or_abort(driver: Any) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await close(driver)
        except Exception:  # noqa: BLE001 the connection is not needed any more
            abort(driver)

    connection.run_async(close_or_abort)


def abort(driver: Any) -> None:
    """Close a driver's connection without telling the server, which may not respond."""
    if hasattr(driver, "terminate"):
        driver.terminate()
    else:
        driver.close()
