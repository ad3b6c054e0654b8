"""
HTTP proxy to the mirrors of Debian packages, the only servers that a build can reach.

`/<n>/<path>` is `<path>` below the nth mirror's address, by GET or HEAD; all else is refused.
Addresses are http, https, or file for a directory of this machine. Redirects to another host are
not followed. Bodies are streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

import httpx

from atoll.drivers.shared import package_proxy
from atoll.drivers.shared.package_proxy import CHUNK_SIZE, RequestRefused

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

    import h11

    from atoll.drivers.shared.package_proxy import ClientConnection

CONNECTIONS = 32
_PATH = re.compile(r"/(\d{1,3})/([!-~]*)")
_REQUEST_HEADERS = (b"if-modified-since", b"if-none-match", b"range", b"if-range")
_RESPONSE_HEADERS = ("content-length", "content-range", "content-type", "etag", "last-modified")


class AptProxy:
    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self.problem: str | None = None
        """Why a mirror could not be reached, if so; a retry may succeed."""

    @contextlib.asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        listener.setblocking(False)
        async with package_proxy.client(trust_env=False) as client:

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                async with self._slots:
                    await package_proxy.serve_connection(
                        reader,
                        writer,
                        partial(self._answer, client),
                        idle=package_proxy.READ_TIMEOUT,
                    )

            server = await asyncio.start_server(answer, sock=listener)
            try:
                yield
            finally:
                server.close()

    async def _answer(
        self, client: httpx.AsyncClient, connection: ClientConnection, request: h11.Request
    ) -> None:
        method = request.method.decode()
        asked = _PATH.fullmatch(request.target.decode("ascii", "replace"))
        if method not in ("GET", "HEAD") or asked is None:
            raise RequestRefused(403, "Only the mirror can be reached from here.")
        number, path = int(asked[1]), asked[2]
        plain = unquote(path)
        if number >= len(self._addresses) or "\0" in plain or ".." in plain.split("/"):
            raise RequestRefused(403, "Only the mirror can be reached from here.")
        address = self._addresses[number]
        if urlsplit(address).scheme == "file":
            await _file(connection, Path(urlsplit(address).path), plain, method)
            return
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in request.headers
            if name in _REQUEST_HEADERS
        }
        try:
            async with package_proxy.forward(client, method, f"{address}/{path}", headers) as found:
                await self._pass_on(connection, found)
        except httpx.HTTPError as error:
            self.problem = f"{urlsplit(address).hostname}: {error or type(error).__name__}"
            raise RequestRefused(502, "The mirror does not answer.") from None

    async def _pass_on(self, connection: ClientConnection, found: httpx.Response) -> None:
        if found.is_redirect:
            raise RequestRefused(403, "The mirror redirects to another host.")
        if found.status_code >= 500 or found.status_code == 429:
            self.problem = f"{found.url.host} answered {found.status_code}"
        headers = [
            (name, found.headers[name]) for name in _RESPONSE_HEADERS if name in found.headers
        ]
        await connection.start(found.status_code, headers)
        async for piece in found.aiter_raw(CHUNK_SIZE):
            await connection.send(piece)
        await connection.end()


async def _file(connection: ClientConnection, top: Path, path: str, method: str) -> None:
    file = await asyncio.to_thread(_open, top, path)
    if file is None:
        raise RequestRefused(404, "There is no such file.")
    with file:
        size = os.fstat(file.fileno()).st_size
        await connection.start(200, [("content-length", str(size))])
        while method == "GET" and (piece := await asyncio.to_thread(file.read, CHUNK_SIZE)):
            await connection.send(piece)
        await connection.end()


def _open(top: Path, path: str) -> BinaryIO | None:
    """A file below `top`, also after links are resolved."""
    file = Path(os.path.realpath(top / path))
    if not file.is_relative_to(os.path.realpath(top)) or not file.is_file():
        return None
    return file.open("rb")
