"""
HTTP between a sandbox without a network and the one server outside that it may reach.

`serve_connection` answers the requests of one connection from inside; `forward` sends one to the
host of its URL, and follows no redirect to another host. Callers decide which URLs are allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import h11
import httpx

from atoll.drivers.shared.url_origin import origin

if TYPE_CHECKING:
    import ssl
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncIterator, Awaitable, Callable


CHUNK_SIZE = 256 * 1024
MAX_REDIRECTS = 5
HEAD_LIMIT = 64 * 1024
UPSTREAM_CONNECTIONS = 16

CONNECT_TIMEOUT = 10.0
"""Seconds to connect to a package index or mirror."""
READ_TIMEOUT = 60.0
"""Seconds within which an index or mirror must send the next bytes of an answer."""


@dataclass(frozen=True)
class Destination:
    """Where a request is sent, and what is added to it there."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)


async def direct(url: str) -> list[Destination]:
    return [Destination(url)]


class RequestRefused(Exception):
    """The request is answered with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ClientConnection:
    """One HTTP/1.1 connection from inside."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, idle: float | None) -> None:
        self._reader = reader
        self._writer = writer
        self._idle = idle
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
        self._began = False
        self._bodiless = False

    async def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._began = True
        await self._send(h11.Response(status_code=status, headers=headers))

    async def send(self, data: bytes) -> None:
        await self._send(h11.Data(data=data))

    async def end(self) -> None:
        await self._send(h11.EndOfMessage())

    async def respond(self, status: int, kind: str, body: bytes) -> None:
        headers = [("content-type", kind), ("content-length", str(len(body)))]
        await self.start(status, headers)
        if not self._bodiless:
            await self.send(body)
        await self.end()

    async def serve(
        self, route: Callable[[ClientConnection, h11.Request], Awaitable[None]]
    ) -> None:
        while (request := await self._request()) is not None:
            try:
                await route(self, request)
            except RequestRefused as error:
                if self._began:
                    return  # Closing the connection shows that the response is incomplete.
                await self.respond(error.status, "text/plain", error.message.encode())
            if not self._next_cycle():
                return

    async def _request(self) -> h11.Request | None:
        found = None
        async with asyncio.timeout(self._idle):
            async for event in self._events():
                if isinstance(event, h11.Request):
                    found = event
                    self._bodiless = event.method == b"HEAD"
                elif isinstance(event, h11.EndOfMessage):
                    return found
        return None

    async def _events(self) -> AsyncIterator[h11.Event]:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(65_536))
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return
            else:
                yield event  # type: ignore[misc]  # h11's types do not distinguish its sentinels.

    def _next_cycle(self) -> bool:
        """Whether the connection can have another request."""
        self._began = False
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()


async def serve_connection(
    reader: StreamReader,
    writer: StreamWriter,
    route: Callable[[ClientConnection, h11.Request], Awaitable[None]],
    *,
    idle: float | None = None,
) -> None:
    """
    Answer the requests of a connection, one after the other, until it is closed or has been idle
    for `idle` seconds.
    """
    connection = ClientConnection(reader, writer, idle)
    try:
        await connection.serve(route)
    except (ConnectionError, TimeoutError, h11.ProtocolError):
        pass  # The client has disconnected, is idle, or did not send HTTP.
    finally:
        writer.close()


def client(*, tls: ssl.SSLContext | None = None, trust_env: bool) -> httpx.AsyncClient:
    """For `forward`; with `trust_env`, the proxies of this process's environment are used."""
    return httpx.AsyncClient(
        verify=True if tls is None else tls,
        follow_redirects=False,
        timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=UPSTREAM_CONNECTIONS),
        # A generic User-Agent, because pages name foreign hosts. No compression, so that the size
        # of a body is known.
        headers={"Accept-Encoding": "identity", "User-Agent": "atoll"},
        trust_env=trust_env,
    )


@contextlib.asynccontextmanager
async def forward(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: dict[str, str],
    *,
    auth: Callable[[str], tuple[str, str] | None] = lambda url: None,
    destinations: Callable[[str], Awaitable[list[Destination]]] = direct,
) -> AsyncIterator[httpx.Response]:
    """
    The response, whose body has not been read yet. It may be a redirect, if that leads to another
    host. `auth` returns a name and a password for a URL, `destinations` where to connect for it.
    """
    first = origin(url)
    for _ in range(MAX_REDIRECTS):
        response = await _sent(client, method, headers, auth(url), await destinations(url))
        try:
            if not response.has_redirect_location:
                yield response
                return
            # Relative to the requested URL, whatever destination it was sent to.
            follow = urljoin(url, response.headers["location"])
            if origin(follow) != first:
                yield response
                return
            url = follow
        finally:
            await response.aclose()
    raise RequestRefused(502, "The server redirects in a loop.")


async def _sent(
    client: httpx.AsyncClient,
    method: str,
    headers: dict[str, str],
    known: tuple[str, str] | None,
    destinations: list[Destination],
) -> httpx.Response:
    """Send to the first destination that accepts a connection."""
    auth = None if known is None else httpx.BasicAuth(*known)
    for number, destination in enumerate(destinations):
        request = client.build_request(
            method,
            destination.url,
            headers={**headers, **destination.headers},
            extensions=destination.extensions,
        )
        try:
            return await client.send(request, stream=True, auth=auth)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if number == len(destinations) - 1:
                raise
    raise httpx.ConnectError("no destination")
