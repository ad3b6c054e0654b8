"""
One Docker engine, and its errors as ours.

What the engine refuses is a `DockerError` with its status for callers to look at inside
`translated`, which makes what is left of it one of ours: an engine that cannot be reached, or that
has trouble of its own, is a `TemporaryError` with code `engine_unavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import weakref
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from atoll.errors import PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiodocker.stream import Stream

    from atoll.settings import DockerSettings

DEFAULT_URL = "unix:///var/run/docker.sock"
UNAVAILABLE = "engine_unavailable"
UNREACHABLE = 900
"""The status by which aiodocker tells that it could not connect."""
OLDEST_API = (1, 41)
"""That of engine 20.10."""
NOT_THERE, BUSY = 404, 409
REMOVE_SECONDS = 30.0
REMOVE_LOOK = 0.05
API = f"v{OLDEST_API[0]}.{OLDEST_API[1]}"
PORT, TLS_PORT = 2375, 2376
NO_SPACE = "no space left on device"
LONGEST_LINE = 4 * 1024 * 1024
"""Bytes of one message of the engine: it has in it what a command printed, or an image's labels."""


class LineTooLong(ValueError):
    """A message of the engine is longer than `LONGEST_LINE`."""


class RawConnection(asyncio.Protocol):
    def abort(self) -> None:
        """End the connection at once, if there is one."""
        raise NotImplementedError


class Engine:
    def __init__(self, settings: DockerSettings) -> None:
        self._settings = settings
        self.url = settings.url or os.environ.get("DOCKER_HOST") or DEFAULT_URL
        self.docker: aiodocker.Docker
        """To be called inside `translated` only."""
        self.info: dict[str, Any] = {}
        """What the engine told of itself when it was opened."""
        self._context: ssl.SSLContext | None = None
        self._dialled: weakref.WeakSet[RawConnection] = weakref.WeakSet()

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, as far as its address tells."""
        return self.url.startswith("unix://")

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout.total_seconds())
        if self.is_local:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                self.url.removeprefix("unix://"), limit=0
            )
            url = "unix://localhost"
        else:
            context = self._context = self._tls()
            connector = aiohttp.TCPConnector(ssl=context if context is not None else False, limit=0)
            scheme = "http" if context is None else "https"
            host, port = self._address
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        # The version of `OLDEST_API` is asked for, and understood by every engine since.
        self.docker = aiodocker.Docker(
            url,
            connector=connector,
            session=aiohttp.ClientSession(connector=connector, timeout=timeout),
            timeout=timeout,
            api_version=API,
        )
        try:
            with translated():
                self.info = dict(await self.docker.system.info())
                told = await self.docker.version()
        except BaseException:
            await self.close()
            raise
        newest = tuple(int(part) for part in told["ApiVersion"].split("."))
        if newest < OLDEST_API:
            await self.close()
            raise PermanentError(
                f"The Docker engine at {self.url} is too old: it has API {told['ApiVersion']}, and "
                f"{API} is needed (engine 20.10 or newer).",
                code="engine_too_old",
            )

    def _tls(self) -> ssl.SSLContext | None:
        settings = self._settings
        if settings.tls_ca is None:
            host = urlsplit(self.url).hostname or ""
            if not settings.insecure and not _is_loopback(host):
                raise PermanentError(
                    f"The Docker engine at {self.url} would be asked without TLS. Set "
                    "ATOLL_DOCKER__TLS_CA, ATOLL_DOCKER__TLS_CERT and ATOLL_DOCKER__TLS_KEY, or "
                    "ATOLL_DOCKER__INSECURE=true if the network is trusted.",
                    code="engine_insecure",
                )
            return None
        try:
            context = ssl.create_default_context(cafile=str(settings.tls_ca))
            if settings.tls_cert is not None:
                context.load_cert_chain(str(settings.tls_cert), settings.tls_key)
        except OSError as error:
            raise PermanentError(
                f"The certificates for the Docker engine cannot be used: {error}",
                code="engine_insecure",
            ) from error
        return context

    async def dial(self, protocol: RawConnection) -> None:
        """A connection of its own to the engine, for what is not a request and an answer."""
        self._dialled.add(protocol)
        loop = asyncio.get_running_loop()
        if self.is_local:
            path = self.url.removeprefix("unix://")
            await loop.create_unix_connection(lambda: protocol, path)
        else:
            await loop.create_connection(lambda: protocol, *self._address, ssl=self._context)

    @property
    def _address(self) -> tuple[str, int]:
        """Host and port of an engine at tcp://; the ports are those that engines have by custom."""
        told = urlsplit(self.url)
        return told.hostname or "", told.port or (PORT if self._context is None else TLS_PORT)

    async def close(self) -> None:
        for protocol in list(self._dialled):
            protocol.abort()
        docker = getattr(self, "docker", None)
        if docker is not None:
            await docker.session.close()
            await docker.close()

    @contextlib.asynccontextmanager
    async def query(
        self, path: str, method: str = "GET", **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """
        What aiodocker has no method for, inside `translated` too. Its own way to ask leaves a
        response that is not read to its end, and the connection with it, to the garbage collector.
        """
        async with self.docker._query(path, method, **options) as response:
            try:
                yield response
            finally:
                _cut(response)

    async def remove(self, container: str) -> None:
        """A container with whatever runs in it, and until it is gone."""
        deadline = asyncio.get_running_loop().time() + REMOVE_SECONDS
        path = f"containers/{container}"
        with translated():
            while True:
                try:
                    async with self.query(path, method="DELETE", params={"force": "1", "v": "1"}):
                        pass
                    async with self.query(f"{path}/json"):
                        pass
                except DockerError as error:
                    if error.status == NOT_THERE:
                        return
                    if error.status != BUSY:
                        raise
                    # Somebody else is removing it.
                if asyncio.get_running_loop().time() > deadline:
                    raise TemporaryError(
                        f"Container {container} is not removed by its engine.",
                        code="instance_stuck",
                    )
                await asyncio.sleep(REMOVE_LOOK)

    async def ping(self) -> str | None:
        """Why the engine cannot be used at the moment; none when it can."""
        try:
            with translated():
                async with self.query("_ping", versioned_api=False):
                    return None
        except TemporaryError as error:
            return error.message


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Messages of the engine, as they come. A line that is too long for aiohttp would end them."""
    rest = b""
    async for piece in response.content.iter_any():
        *found, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise LineTooLong("the engine sends a line without end")
        for line in found:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


async def end(stream: Stream) -> None:
    """Close a stream of a container, in both directions."""
    connection = stream._resp.connection if stream._resp is not None else None
    transport = connection.transport if connection is not None else None
    await stream.close()
    if transport is not None:
        transport.abort()


def _cut(response: aiohttp.ClientResponse) -> None:
    """Over TLS the other side's goodbye would be waited for, which has more to say instead."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What goes wrong between us and the engine, as an error of ours."""
    try:
        yield
    except DockerError as error:
        if error.status == UNREACHABLE or error.status >= 500:
            full = NO_SPACE in str(error.message).lower()
            raise TemporaryError(
                f"The Docker engine: {error.message}",
                code="node_full" if full else UNAVAILABLE,
            ) from error
        raise PermanentError(
            f"The Docker engine refused: {error.message}", code="engine_refused"
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        words = str(error) or type(error).__name__
        raise TemporaryError(
            f"The Docker engine does not answer: {words}", code=UNAVAILABLE
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
