"""
Connections to MariaDB and PostgreSQL.

A new connection goes to the first address that answers, in the order given: a secondary is used
while the primary does not answer, and by no connection made after it is back. A connection that was
idle is tried before it is used; one that fails this takes all older ones with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from atoll.stores.sql.dsn import Address, Kind, addresses
from atoll.stores.sql.faults import Unreached, said

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from atoll.settings import DatabaseSettings

DIALECTS = {Kind.MARIADB: "mysql+aiomysql://", Kind.POSTGRESQL: "postgresql+asyncpg://"}

Talk = Callable[[Any], Awaitable[object]]
PING: Mapping[Kind, Talk] = {
    Kind.MARIADB: lambda driver: driver.ping(reconnect=False),
    Kind.POSTGRESQL: lambda driver: driver.execute("SELECT 1"),
}
GOODBYE_TIMEOUT = 1.0

# Whatever the server is configured to: text that does not fit is an error, never cut off.
SQL_MODE = "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'"


def make_engine(urls: Sequence[str], settings: DatabaseSettings) -> AsyncEngine:
    """An engine on one database by all its addresses. It connects when it is first used."""
    found = addresses(urls)
    kind = found[0].kind
    engine = create_async_engine(
        DIALECTS[kind],
        async_creator=partial(connect_first, found, settings.connect_timeout),
        # Sets `autocommit` as well, whatever the URL says of it.
        isolation_level="READ COMMITTED",
        pool_size=settings.pool_size,
        max_overflow=settings.max_overflow,
        pool_timeout=settings.pool_timeout.total_seconds(),
        pool_recycle=int(settings.pool_recycle.total_seconds()),
        # What users wrote is not for logs.
        hide_parameters=True,
        # Whoever uses a connection ends its transaction; a second ROLLBACK is a round trip.
        pool_reset_on_return=None,
    )
    if settings.pre_ping:
        # Not SQLAlchemy's own, which waits for ever where a host is silent.
        try_out = partial(_try_out, PING[kind], settings.connect_timeout)
        sa.event.listen(engine.sync_engine, "checkout", try_out)
    # Nor does its way to close one have an end.
    sa.event.listen(engine.sync_engine, "close", partial(_part, GOODBYE[kind]))
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
        except Exception as error:  # noqa: BLE001 drivers raise anything, and the next may answer
            failures.append(f"{address.name}: {said(error)}")
    raise Unreached(f"The database cannot be reached ({'; '.join(failures)}).")


async def _connect_mariadb(address: Address) -> Any:
    import aiomysql
    from pymysql.constants import CLIENT

    class Connection(aiomysql.Connection):  # type: ignore[misc]
        async def _request_authentication(self) -> None:
            # The driver would go on in the clear, and tell the password to whoever asks.
            if self._ssl_context and not self.server_capabilities & CLIENT.SSL:
                raise ConnectionError("the server offers no TLS")
            await super()._request_authentication()

        def close(self) -> None:
            # The driver's own, also used when a caller is cancelled, stays open until all that is
            # buffered has been sent, and with TLS until the server has said goodbye as well.
            if self._writer is not None:
                self._writer.transport.abort()
            super().close()

    given = {"charset": "utf8mb4", "sql_mode": SQL_MODE, **address.arguments}
    # Rows that matched, not those that changed, as on the other databases.
    connection = Connection(client_flag=CLIENT.FOUND_ROWS, **given)
    try:
        await connection._connect()
    except BaseException:
        # All that `aiomysql.connect` lacks: it leaves a connection open that took too long.
        sever(connection)
        raise
    return connection


async def _connect_postgresql(address: Address) -> Any:
    import asyncpg

    return await asyncpg.connect(**address.arguments)


_CONNECT = {Kind.MARIADB: _connect_mariadb, Kind.POSTGRESQL: _connect_postgresql}


def _try_out(ping: Talk, timeout: timedelta, connection: Any, record: Any, _proxy: Any) -> None:
    if "used" not in record.info:
        record.info["used"] = True
        return

    async def answer(driver: Any) -> None:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await ping(driver)
        except Exception as error:
            sever(driver)
            raise sa.exc.InvalidatePoolError from error
        except BaseException:
            sever(driver)
            raise

    connection.run_async(answer)


GOODBYE: Mapping[Kind, Talk] = {
    Kind.MARIADB: lambda driver: driver.ensure_closed(),
    Kind.POSTGRESQL: lambda driver: driver.close(),
}


def _part(goodbye: Talk, connection: Any, _record: Any) -> None:
    async def part(driver: Any) -> None:
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT):
                await goodbye(driver)
        except Exception:  # noqa: BLE001 whatever it is, the connection is not needed any more
            sever(driver)

    connection.run_async(part)


def sever(driver: Any) -> None:
    """Cut a driver's connection without a word to the server, which may not be listening."""
    if hasattr(driver, "terminate"):
        driver.terminate()
    else:
        driver.close()
