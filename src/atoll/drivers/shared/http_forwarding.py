"""
How a sandbox without a network is given the one thing outside that it may reach, by HTTP.

`converse` answers the requests of one connection from inside, `ask` passes one on: to the host that
it names, and to no other that a redirect leads to. What may be asked for is for the caller to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import h11
import httpx

if TYPE_CHECKING:
    import ssl
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncIterator, Awaitable, Callable


PIECE = 256 * 1024
MOST_REDIRECTS = 5
HEAD_LIMIT = 64 * 1024
UPSTREAM_CONNECTIONS = 16

CONNECT_TIMEOUT = 10.0
"""Seconds to connect to a package index or mirror."""
READ_TIMEOUT = 60.0
"""Seconds within which an index or mirror must send the next bytes of an answer."""


@dataclass(frozen=True)
class Way:
    """Where a request is sent, with what else goes into it there."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)


async def straight(url: str) -> list[Way]:
    return [Way(url)]


class Refused(Exception):
    """An answer other than what was asked for."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


class Peer:
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

    async def whole(self, status: int, kind: str, body: bytes) -> None:
        headers = [("content-type", kind), ("content-length", str(len(body)))]
        await self.start(status, headers)
        if not self._bodiless:
            await self.send(body)
        await self.end()

    async def serve(self, route: Callable[[Peer, h11.Request], Awaitable[None]]) -> None:
        while (request := await self._request()) is not None:
            try:
                await route(self, request)
            except Refused as error:
                if self._began:
                    return  # The connection breaks off: what was sent is not the whole.
                await self.whole(error.status, "text/plain", error.words.encode())
            if not self._again():
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
                yield event  # type: ignore[misc]  # Its own types do not tell the marks apart.

    def _again(self) -> bool:
        """Whether the next request may come on this connection."""
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


async def converse(
    reader: StreamReader,
    writer: StreamWriter,
    route: Callable[[Peer, h11.Request], Awaitable[None]],
    *,
    idle: float | None = None,
) -> None:
    """
    Answer the requests of a connection, one after the other, to its end, or until none has come for
    `idle` seconds.
    """
    peer = Peer(reader, writer, idle)
    try:
        await peer.serve(route)
    except (ConnectionError, TimeoutError, h11.ProtocolError):
        pass  # It went away, is silent, or talks something else.
    finally:
        writer.close()


def client(*, tls: ssl.SSLContext | None = None, trust_env: bool) -> httpx.AsyncClient:
    """For `ask`; `trust_env` is whether the proxies of this process's environment are used."""
    return httpx.AsyncClient(
        verify=True if tls is None else tls,
        follow_redirects=False,
        timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=UPSTREAM_CONNECTIONS),
        # Ours is not for hosts that a page names; and of compressed bytes the size is not told.
        headers={"Accept-Encoding": "identity", "User-Agent": "atoll"},
        trust_env=trust_env,
    )


@contextlib.asynccontextmanager
async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: dict[str, str],
    *,
    auth: Callable[[str], tuple[str, str] | None] = lambda url: None,
    ways: Callable[[str], Awaitable[list[Way]]] = straight,
) -> AsyncIterator[httpx.Response]:
    """
    The answer, whose body is read as it is taken. It is a redirect still if that leads to another
    host. `auth` is asked for a name and a password for each address, `ways` for where to connect.
    """
    asked = origin(url)
    for _ in range(MOST_REDIRECTS):
        response = await _sent(client, method, headers, auth(url), await ways(url))
        try:
            if not response.has_redirect_location:
                yield response
                return
            # Of the address that was asked for, whichever the request went to.
            follow = urljoin(url, response.headers["location"])
            if origin(follow) != asked:
                yield response
                return
            url = follow
        finally:
            await response.aclose()
    raise Refused(502, "It sends round in circles.")


async def _sent(
    client: httpx.AsyncClient,
    method: str,
    headers: dict[str, str],
    known: tuple[str, str] | None,
    ways: list[Way],
) -> httpx.Response:
    """By the first way on which there is somebody."""
    auth = None if known is None else httpx.BasicAuth(*known)
    for number, way in enumerate(ways):
        request = client.build_request(
            method, way.url, headers={**headers, **way.headers}, extensions=way.extensions
        )
        try:
            return await client.send(request, stream=True, auth=auth)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if number == len(ways) - 1:
                raise
    raise httpx.ConnectError("there is no way to it")


def origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port
