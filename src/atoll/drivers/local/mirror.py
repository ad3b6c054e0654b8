"""
The mirror of Debian packages, as a build sees it: the only thing outside that it can reach.

`/<n>/<path>` is `<path>` beneath the nth address that it was made with, by GET or HEAD; there is
nothing else. Addresses are http, https, or file for a directory of this machine. It follows no
redirect to another host. Bodies are passed on as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

import httpx
import structlog

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

    from atoll.settings import PackageSettings

log = structlog.get_logger(__name__)

HEAD_LIMIT = 16 * 1024
CONNECTIONS = 32
REDIRECTS = 5
PIECE = 256 * 1024
_REQUEST = re.compile(rb"(GET|HEAD) /(\d{1,3})/([!-~]*) HTTP/1\.[01]\r\n")
_ASKED = (b"if-modified-since", b"if-none-match", b"range", b"if-range")
_TOLD = ("content-length", "content-range", "content-type", "etag", "last-modified")


class Mirror:
    def __init__(self, addresses: Sequence[str], settings: PackageSettings) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._timeout = settings.read_timeout.total_seconds()
        self._connecting = settings.connect_timeout.total_seconds()
        self._free = asyncio.Semaphore(CONNECTIONS)
        self.trouble: str | None = None
        """Why the mirror could not be reached, if it could not: a fault that may pass."""

    @contextlib.asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        listener.setblocking(False)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(self._timeout, connect=self._connecting),
            headers={"Accept-Encoding": "identity", "User-Agent": "atoll"},
            trust_env=False,
        ) as client:

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    async with self._free:
                        await self._answer(client, reader, writer)
                except (OSError, TimeoutError, asyncio.IncompleteReadError):
                    pass  # Who asked has gone, or says nothing.
                except asyncio.LimitOverrunError:
                    pass
                finally:
                    writer.close()

            server = await asyncio.start_server(answer, sock=listener, limit=HEAD_LIMIT)
            try:
                yield
            finally:
                server.close()

    async def _answer(
        self, client: httpx.AsyncClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(self._timeout):
            head = await reader.readuntil(b"\r\n\r\n")
        asked = _REQUEST.match(head)
        if asked is None:
            await _tell(writer, 400)
            return
        method, path = asked[1].decode(), asked[3].decode()
        number = int(asked[2])
        parts = unquote(path).split("/")
        if number >= len(self._addresses) or "\0" in unquote(path) or ".." in parts:
            await _tell(writer, 403)
            return
        headers = {}
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() in _ASKED:
                headers[name.strip().decode()] = value.strip().decode("latin-1")
        address = self._addresses[number]
        if urlsplit(address).scheme == "file":
            await self._file(Path(urlsplit(address).path), unquote(path), method, writer)
            return
        try:
            await self._pass_on(client, method, f"{address}/{path}", headers, writer)
        except httpx.HTTPError as error:
            self.trouble = f"{urlsplit(address).hostname}: {error or type(error).__name__}"
            await _tell(writer, 502)

    async def _pass_on(
        self,
        client: httpx.AsyncClient,
        method: str,
        url: str,
        headers: dict[str, str],
        writer: asyncio.StreamWriter,
    ) -> None:
        origin = httpx.URL(url)
        for _ in range(REDIRECTS):
            async with client.stream(method, url, headers=headers) as answer:
                if answer.next_request is not None:
                    there = answer.next_request.url
                    if (there.scheme, there.host, there.port) != (
                        origin.scheme, origin.host, origin.port,
                    ):  # fmt: skip
                        break
                    url = str(there)
                    continue
                if answer.status_code >= 500 or answer.status_code == 429:
                    self.trouble = f"{origin.host} answered {answer.status_code}"
                told = {name: answer.headers[name] for name in _TOLD if name in answer.headers}
                await _tell(writer, answer.status_code, told)
                async for piece in answer.aiter_raw(PIECE):
                    writer.write(piece)
                    await writer.drain()
                return
        await _tell(writer, 403)

    async def _file(self, top: Path, path: str, method: str, writer: asyncio.StreamWriter) -> None:
        file = await asyncio.to_thread(_open, top, path)
        if file is None:
            await _tell(writer, 404)
            return
        with file:
            await _tell(writer, 200, {"content-length": str(os.fstat(file.fileno()).st_size)})
            while method == "GET" and (piece := await asyncio.to_thread(file.read, PIECE)):
                writer.write(piece)
                await writer.drain()


def _open(top: Path, path: str) -> BinaryIO | None:
    """A file that lies beneath, wherever links lead."""
    place = Path(os.path.realpath(top / path))
    if not place.is_relative_to(os.path.realpath(top)) or not place.is_file():
        return None
    return place.open("rb")


async def _tell(
    writer: asyncio.StreamWriter, status: int, headers: dict[str, str] | None = None
) -> None:
    lines = [f"HTTP/1.1 {status} {httpx.codes.get_reason_phrase(status) or 'Answer'}"]
    headers = {"content-length": "0"} if headers is None else headers
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1"))
    await writer.drain()
