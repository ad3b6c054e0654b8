"""
What is sent to Redis: bounded in time, with every failure as `TemporaryError`.

Nothing is sent again after a failure, because it may have been done. What is sent is waited for
even when the caller is cancelled: afterwards it is done or has failed, so there is something to
undo or there is not. A server in cluster mode is recognised when connecting; each command then goes
to the node that has its key.
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
    # How a connection that goes while something is sent by it shows itself: redis-py has no writer
    # any more, or uvloop a transport that is closed.
    AttributeError,
    RuntimeError,
)

T = TypeVar("T")


async def complete(work: Coroutine[Any, Any, T]) -> T:
    """
    What the work gives. A caller that is cancelled meanwhile is kept until the work has ended, so
    this is for work that is bounded in time.
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
"""What may stand behind the `?` of an address; the rest are settings."""


def check_address(url: str) -> None:
    """Refuse an address with a mistake in it, without showing any of it but a parameter's name."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("redis", "rediss", "unix")
        port_fits = parts.scheme == "unix" or parts.port != 0
    except ValueError:
        known, port_fits = True, False
    if not known:
        raise _bad_address("it begins with redis://, rediss:// or unix://")
    if not port_fits or parts.fragment:
        raise _bad_address("its port is no number, or a / # ? @ in the password is not escaped")
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):
        raise _bad_address(
            "what follows the host is the number of a database; write a / # ? @ in the password as "
            "%2F %23 %3F %40"
        )
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name not in PARAMETERS:
            raise _bad_address(f"{name} is not one of {', '.join(sorted(PARAMETERS))}")


def _bad_address(why: str) -> InvalidRequest:
    return InvalidRequest(f"redis_url is no address of a Redis: {why}.", code="bad_redis_url")


class Wire(Protocol):
    """A connection of redis-py, as far as it is used here."""

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
        self.patience = self._connect_timeout + self._read_timeout
        """Seconds after which a command has failed."""
        self._options: dict[str, Any] = {
            "socket_timeout": self._read_timeout,
            "socket_connect_timeout": self._connect_timeout,
            "decode_responses": True,
            "encoding_errors": "surrogatepass",
            "protocol": 2,
        }
        # One connection is the ear's.
        self._most = settings.max_connections - 1
        self._turns = asyncio.Semaphore(self._most)
        self._client: Redis | RedisCluster | None = None
        check_address(url)
        try:
            self._pool = ConnectionPool.from_url(
                url, max_connections=self._most, retry=Retry(NoBackoff(), 0), **self._options
            )
            address = urlsplit(url)
            self._place = address.path if not address.hostname else address.netloc.split("@")[-1]
        except ValueError:
            # Without the cause, which may show the password.
            raise _bad_address("a parameter has a value that is not allowed") from None

    async def open(self) -> None:
        if self._client is not None:
            return
        self._client = client = Redis(connection_pool=self._pool)
        try:
            cluster = await self.send("INFO", "cluster")
        except TemporaryError as error:
            # Some services forbid INFO; those of them with a cluster answer like one server.
            if not isinstance(error.__cause__, NoPermissionError):
                raise
            return
        if cluster.get("cluster_enabled") != 1:
            return
        await client.aclose(close_connection_pool=True)
        self._client = RedisCluster.from_url(
            self._url,
            max_connections=self._most,
            # Connections are not looked at before they are used again, so the first may be stale.
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
                    # After a failure the client takes itself for closed.
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
            async with asyncio.timeout(self.patience), self._turns:
                return await work
        except FAILURES as error:
            if isinstance(error, ReadOnlyError):
                # A former primary; its name may lead to another server by now.
                await self._pool.disconnect(inuse_connections=False)
            raise self.unavailable(error) from error
        finally:
            work.close()

    def unavailable(self, error: Exception) -> TemporaryError:
        reason = str(error).rstrip(".") or type(error).__name__
        return CoordinationUnavailable(
            f"Redis at {self._place} cannot be used: {reason}. Check that it runs and that"
            " redis_url leads to it.",
        )

    def wire(self) -> Wire:
        """A connection for pub/sub, not connected yet; in a cluster to any of its nodes."""
        options = dict(self._pool.connection_kwargs)
        if isinstance(self._client, RedisCluster) and (nodes := self._client.get_nodes()):
            node = random.choice(nodes)  # noqa: S311
            options |= {"host": node.host, "port": node.port}
        wire: Wire = self._pool.connection_class(**options)
        return wire
