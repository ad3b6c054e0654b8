"""
Sends commands to Redis, bounded in time; every failure is `CoordinationUnavailable`.

A failed command is not repeated, because it may have been executed. A command is awaited even when
the caller is cancelled, so that the caller knows afterwards whether there is something to undo. A
cluster is detected on connecting; each command then goes to the node that has its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from atoll.errors import CoordinationUnavailable, InvalidRequest, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from atoll.coordination.redis.scripts import Script
    from atoll.settings import CoordinationSettings

FAILURES = (
    RedisError,
    RedisClusterException,
    OSError,
    TimeoutError,
    # Raised when a connection is lost while a command is being written: redis-py has no writer any
    # more, or uvloop's transport is closed.
    AttributeError,
    RuntimeError,
)

T = TypeVar("T")


async def complete(work: Coroutine[Any, Any, T]) -> T:
    """
    The result of the work. A caller that is cancelled meanwhile still waits until the work has
    ended, so use this only for work that is bounded in time.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()
        raise cancelled
    return task.result()


PARAMETERS = frozenset(
    {
        "db",
        "username",
        "password",
        "client_name",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_check_hostname",
    }
)
"""Query parameters that an address may have; everything else is a setting."""


def check_address(url: str) -> None:
    """Refuse an invalid address; the message shows no part of it except a parameter's name."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("redis", "rediss", "unix")
        port_fits = parts.scheme == "unix" or parts.port != 0
    except ValueError:
        known, port_fits = True, False
    if not known:
        raise _bad_address("It must begin with redis://, rediss:// or unix://")
    if not port_fits or parts.fragment:
        raise _bad_address("The port is invalid, or a / # ? @ in the password is not escaped")
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):
        raise _bad_address(
            "The path must be the number of a database. Write / # ? @ in the password as %2F %23 "
            "%3F %40"
        )
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name not in PARAMETERS:
            raise _bad_address(f"{name} is not one of {', '.join(sorted(PARAMETERS))}")


def _bad_address(why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid redis_url. {why}.", code="bad_redis_url")


class Wire(Protocol):
    """The part of a redis-py connection that is used here."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def send_command(self, *args: str, check_health: bool = True) -> None: ...
    async def read_response(
        self, *, timeout: float | None = None, disconnect_on_error: bool = True
    ) -> Any: ...


class Commands:
    def __init__(self, url: str, settings: CoordinationSettings) -> None:
        self._url = url
        self._read_timeout = settings.read_timeout.total_seconds()
        self._connect_timeout = settings.connect_timeout.total_seconds()
        self.timeout = self._connect_timeout + self._read_timeout
        """Seconds after which a command counts as failed."""
        self._options: dict[str, Any] = {
            "socket_timeout": self._read_timeout,
            "socket_connect_timeout": self._connect_timeout,
            "decode_responses": True,
            "encoding_errors": "surrogatepass",
            "protocol": 2,
        }
        # One connection is the listener's.
        self._max_connections = settings.max_connections - 1
        self._slots = asyncio.Semaphore(self._max_connections)
        self._client: Redis | RedisCluster | None = None
        check_address(url)
        try:
            self._pool = ConnectionPool.from_url(
                url,
                max_connections=self._max_connections,
                retry=Retry(NoBackoff(), 0),
                **self._options,
            )
            address = urlsplit(url)
            self._address = address.path if not address.hostname else address.netloc.split("@")[-1]
        except ValueError:
            # Without the cause, which may show the password.
            raise _bad_address("A parameter has an invalid value") from None

    async def open(self) -> None:
        if self._client is not None:
            return
        self._client = client = Redis(connection_pool=self._pool)
        try:
            cluster = await self.send("INFO", "cluster")
        except TemporaryError as error:
            # Some hosted services forbid INFO; their clusters behave like one server.
            if not isinstance(error.__cause__, NoPermissionError):
                raise
            return
        if cluster.get("cluster_enabled") != 1:
            return
        await client.aclose(close_connection_pool=True)
        self._client = RedisCluster.from_url(
            self._url,
            max_connections=self._max_connections,
            # Connections are not checked before they are reused, so the first may be stale.
            retry=Retry(NoBackoff(), 1),
            **self._options,
        )
        await self._bounded(self._client.initialize())

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        with contextlib.suppress(*FAILURES):
            async with asyncio.timeout(self._connect_timeout):
                if isinstance(client, RedisCluster):
                    await client.aclose()
                    # After a failure the client considers itself closed.
                    await client.nodes_manager.aclose()
                    await client.nodes_manager.aclose("startup_nodes")
                else:
                    await client.aclose()
                    await self._pool.disconnect()

    async def send(self, *command: str | int) -> Any:
        return await complete(self._bounded(self._execute(*command)))

    async def run(self, script: Script, keys: Sequence[str], *args: str | int) -> Any:
        return await complete(self._bounded(self._run(script, (len(keys), *keys, *args))))

    async def _run(self, script: Script, args: tuple[str | int, ...]) -> Any:
        try:
            return await self._execute("EVALSHA", script.sha, *args)
        except NoScriptError:
            return await self._execute("EVAL", script.text, *args)

    async def _execute(self, *command: str | int) -> Any:
        if self._client is None:
            raise ConnectionError("not connected")
        return await self._client.execute_command(*command)

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self.timeout), self._slots:
                return await work
        except FAILURES as error:
            if isinstance(error, ReadOnlyError):
                # A former primary; its name may resolve to another server by now.
                await self._pool.disconnect(inuse_connections=False)
            raise self.unavailable(error) from error
        finally:
            work.close()

    def unavailable(self, error: Exception) -> TemporaryError:
        reason = str(error).rstrip(".") or type(error).__name__
        return CoordinationUnavailable(
            f"Redis at {self._address} cannot be used: {reason}. Check that it is running and that"
            " redis_url is right.",
        )

    def wire(self) -> Wire:
        """A connection for pub/sub, not connected yet; in a cluster to any of its nodes."""
        options = dict(self._pool.connection_kwargs)
        if isinstance(self._client, RedisCluster) and (nodes := self._client.get_nodes()):
            node = random.choice(nodes)  # noqa: S311
            options |= {"host": node.host, "port": node.port}
        wire: Wire = self._pool.connection_class(**options)
        return wire
