"""
Connection to one Docker engine.

Unless a method says otherwise it raises `DockerError` and errors of the HTTP client: it is called
inside `errors.translated`, so that the caller can handle an HTTP status first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import weakref
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiodocker
import aiohttp

from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, EngineInsecure, ignored, translated
from atoll.errors import PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import timedelta

    from aiodocker.stream import Stream

    from atoll.settings import DockerSettings

DEFAULT_URL = "unix:///var/run/docker.sock"
MIN_API = (1, 41)
"""Version of the API of engine 20.10. Every later engine understands requests of this version."""
API = f"v{MIN_API[0]}.{MIN_API[1]}"
PORT, TLS_PORT = 2375, 2376
REMOVE_TIMEOUT = 30.0
REMOVE_CHECK_INTERVAL = 0.05
MAX_LINE = 4 * 1024 * 1024
"""
Bytes of one message of a stream of JSON messages. A message can contain a line that a command of a
Dockerfile printed, or all labels of an image.
"""


class LineTooLong(ValueError):
    """A message of the engine is longer than `MAX_LINE`."""


class RawConnection(asyncio.Protocol):
    """A connection to the engine that is not an HTTP request and its response."""

    def abort(self) -> None:
        """Close the connection at once, if it is open."""
        raise NotImplementedError


class Engine:
    def __init__(self, settings: DockerSettings) -> None:
        self._settings = settings
        self.url = settings.url or os.environ.get("DOCKER_HOST") or DEFAULT_URL
        self.docker: aiodocker.Docker
        self.info: dict[str, Any] = {}
        """The engine's answer to `GET /info` when it was opened."""
        self._tls: ssl.SSLContext | None = None
        self._raw_connections: weakref.WeakSet[RawConnection] = weakref.WeakSet()

    @property
    def timeout(self) -> timedelta:
        """Of an ordinary request."""
        return self._settings.timeout

    @property
    def is_local(self) -> bool:
        """Whether the engine is reached over a unix socket, and so probably on this machine."""
        return self.url.startswith("unix://")

    def has_security_option(self, *names: str) -> bool:
        """Whether the engine has one of these, such as `seccomp` or `rootless`."""
        options = self.info.get("SecurityOptions") or []
        return any(f"name={name}" in option for option in options for name in names)

    def is_gvisor(self, runtime: str) -> bool:
        """Whether containers of this runtime have a kernel of their own; "" is the default one."""
        name = runtime or self.info.get("DefaultRuntime", "")
        details = (self.info.get("Runtimes") or {}).get(name) or {}
        return any("runsc" in str(word) for word in (name, *details.values()))

    async def open(self) -> None:
        """Raises errors of Atoll, `PermanentError` if the engine is too old or not secured."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout.total_seconds())
        if self.is_local:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                self.url.removeprefix("unix://"), limit=0
            )
            url = "unix://localhost"
        else:
            context = self._tls = self._tls_context()
            connector = aiohttp.TCPConnector(ssl=context if context is not None else False, limit=0)
            scheme = "http" if context is None else "https"
            host, port = self._address
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
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
                version = (await self.docker.version())["ApiVersion"]
        except BaseException:
            await self.close()
            raise
        if tuple(int(part) for part in version.split(".")) < MIN_API:
            await self.close()
            raise PermanentError(
                f"The Docker engine at {self.url} is too old: its API is version {version}, but "
                f"{API} is needed (engine 20.10 or newer).",
                code="engine_too_old",
            )

    def _tls_context(self) -> ssl.SSLContext | None:
        settings = self._settings
        if settings.tls_ca is None:
            host = urlsplit(self.url).hostname or ""
            if not settings.insecure and not _is_loopback(host):
                raise EngineInsecure(
                    f"The connection to the Docker engine at {self.url} would not be encrypted. "
                    "Set ATOLL_DOCKER__TLS_CA, ATOLL_DOCKER__TLS_CERT and ATOLL_DOCKER__TLS_KEY, "
                    "or ATOLL_DOCKER__INSECURE=true if you trust the network."
                )
            return None
        try:
            context = ssl.create_default_context(cafile=str(settings.tls_ca))
            if settings.tls_cert is not None:
                context.load_cert_chain(str(settings.tls_cert), settings.tls_key)
        except OSError as error:
            raise EngineInsecure(
                f"Cannot load the certificates for the Docker engine: {error}"
            ) from error
        return context

    @property
    def _address(self) -> tuple[str, int]:
        """Host and port of a `tcp://` URL, with Docker's default ports."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (PORT if self._tls is None else TLS_PORT)

    async def close(self) -> None:
        for connection in list(self._raw_connections):
            connection.abort()
        docker = getattr(self, "docker", None)
        if docker is not None:
            # Idle TLS connections would wait for a closing handshake of the engine.
            if docker.session.connector is not None:
                await docker.session.connector.close(abort_ssl=True)
            await docker.session.close()
            await docker.close()

    async def ping(self) -> str | None:
        """Why the engine cannot be used at the moment; null if it can."""
        try:
            with translated():
                await self.call("GET", "_ping", versioned_api=False)
        except TemporaryError as error:
            return error.message
        return None

    # Requests for which aiodocker has no suitable method

    @contextlib.asynccontextmanager
    async def query(
        self, path: str, method: str = "GET", **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """
        One request. aiodocker's own methods leave a response that is not read to its end, and with
        it the connection, to the garbage collector.
        """
        async with self.docker._query(path, method, **options) as response:
            try:
                yield response
            finally:
                _abort(response)

    async def call(self, method: str, path: str, **options: Any) -> bytes:
        """The complete body of the response. Some calls, such as `wait`, end only with that."""
        async with self.query(path, method, **options) as response:
            return await response.read()

    async def dial(self, protocol: RawConnection) -> None:
        """Open a connection for `protocol`, which `close` aborts."""
        self._raw_connections.add(protocol)
        loop = asyncio.get_running_loop()
        if self.is_local:
            path = self.url.removeprefix("unix://")
            await loop.create_unix_connection(lambda: protocol, path)
        else:
            await loop.create_connection(lambda: protocol, *self._address, ssl=self._tls)

    # Containers

    async def containers(
        self, filters: Mapping[str, list[str]], *, stopped: bool = True
    ) -> list[dict[str, Any]]:
        """Containers as `GET /containers/json` lists them; without `stopped`, those that run."""
        params = {"all": "1" if stopped else "0", "filters": json.dumps(dict(filters))}
        return list(json.loads(await self.call("GET", "containers/json", params=params)))

    async def inspect(self, container: str) -> dict[str, Any] | None:
        """A container by id or name; null if it does not exist."""
        with ignored(NOT_FOUND):
            return dict(json.loads(await self.call("GET", f"containers/{container}/json")))
        return None

    async def remove(self, container: str) -> None:
        """
        Kill and remove a container, and wait until it is gone. Raises `TemporaryError` and errors
        that `translated` makes.
        """
        deadline = asyncio.get_running_loop().time() + REMOVE_TIMEOUT
        with translated():
            while True:
                # A conflict means that another client is removing it.
                with ignored(NOT_FOUND, CONFLICT):
                    await self.delete_container(container)
                if await self.inspect(container) is None:
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise TemporaryError(
                        f"The engine did not remove container {container} within "
                        f"{REMOVE_TIMEOUT:.0f} s.",
                        code="instance_stuck",
                    )
                await asyncio.sleep(REMOVE_CHECK_INTERVAL)

    async def delete_container(self, container: str) -> None:
        """Kill and remove a container with its anonymous volumes, without waiting."""
        params = {"force": "1", "v": "1"}
        await self.call("DELETE", f"containers/{container}", params=params)


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Messages as they arrive. aiohttp's own `readline` allows only short lines."""
    rest = b""
    async for piece in response.content.iter_any():
        *complete, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE:
            raise LineTooLong(f"The engine sent a message of more than {MAX_LINE} bytes.")
        for line in complete:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


async def close_stream(stream: Stream) -> None:
    """Close the attached standard streams of a container, in both directions."""
    connection = stream._resp.connection if stream._resp is not None else None
    transport = connection.transport if connection is not None else None
    await stream.close()
    if transport is not None:
        transport.abort()


def _abort(response: aiohttp.ClientResponse) -> None:
    """
    Close a response that may have more to come. A closing handshake of TLS would wait for the
    engine, which sends data instead.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
