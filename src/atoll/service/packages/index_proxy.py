"""
HTTP proxy through which an installation reaches the package index, and nothing else.

One proxy serves one installation, over connections from inside its sandbox. It answers
`GET /simple/<name>/` with the index's page in the form of PEP 691, in which every link leads to the
proxy, and `GET` or `HEAD /files/<token>/<name>` for a link on such a page. It refuses everything
else. The sandbox never learns the URL of the index, which may contain a password, and cannot choose
a URL. Redirects are followed only to the same host; `allowed_hosts` decides which hosts links may
lead to.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import httpx
import structlog
from packaging.utils import canonicalize_name

from atoll.drivers.shared import package_proxy
from atoll.drivers.shared.package_proxy import CHUNK_SIZE, RequestRefused
from atoll.service.packages.allowed_hosts import AllowedHosts
from atoll.service.packages.index import ACCEPT
from atoll.service.packages.index_files import IndexFiles, UnreadablePage
from atoll.service.packages.index_page import JSON_PAGE, PAGE_LIMIT
from atoll.service.packages.wheel_downloads import WheelDownloads

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import h11

    from atoll.drivers.base import Wheel
    from atoll.drivers.shared.package_proxy import ClientConnection, Destination
    from atoll.service.packages.index import Index
    from atoll.service.packages.wheel_downloads import WheelDownload
    from atoll.settings import PackageSettings

METADATA_LIMIT = 8 * 1024 * 1024
CONCURRENT_PAGES = 4
"""Pages for one installation at the same time: each needs memory and a process."""
MAX_DIGITS = 19
CONNECTIONS = 64
SIMPLE = re.compile(r"/simple/([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)/")
FILES = re.compile(r"/files/([0-9a-f]{32})/([^/]+)")
METADATA, WHEEL = ".metadata", ".whl"
RANGE = re.compile(r"bytes=\d*-\d*")
PASSED = ("content-type", "content-length", "content-range", "accept-ranges", "etag")

T = TypeVar("T")

log = structlog.get_logger(__name__)

MAX_FILE_SIZE = 4 * 1024**3
"""Bytes of the largest file that is downloaded from the index."""


class IndexProxy:
    def __init__(
        self, index: Index, settings: PackageSettings, report: Callable[[str], None], place: Path
    ) -> None:
        """`place` is a directory for downloaded wheels; `report` writes to the log."""
        self._index = index
        self._report = report
        self._links = IndexFiles()
        self._downloads = WheelDownloads(place)
        self._hosts = AllowedHosts(index.url, settings)
        self._left = settings.disk
        """Bytes that may still be downloaded."""
        self._pages = asyncio.Semaphore(CONCURRENT_PAGES)
        self._serving: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None
        self.failed_temporarily = False
        """Whether the index did not answer: a retry may succeed."""

    async def __aenter__(self) -> IndexProxy:
        # Trusted certificates are read from disk.
        tls = await asyncio.to_thread(self._index.tls)
        self._client = package_proxy.client(tls=tls, trust_env=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        assert self._client is not None
        await self._client.aclose()

    def wheels(self) -> list[Wheel]:
        """Wheels that were downloaded, as the index has them."""
        return self._downloads.wheels()

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._serving) >= CONNECTIONS:
            writer.close()
            return
        self._serving.add(task)
        try:
            await package_proxy.serve_connection(reader, writer, self._answer)
        except asyncio.CancelledError:
            # The installation has ended. Nobody awaits this task.
            pass
        finally:
            self._serving.discard(task)

    async def _answer(self, connection: ClientConnection, request: h11.Request) -> None:
        try:
            await self._route(connection, request)
        except (httpx.InvalidURL, ValueError):
            # Of a link on a page, or a redirect.
            self._report("The package index links to an invalid URL.")
            raise RequestRefused(502, "The index links to an invalid URL.") from None
        except httpx.HTTPError as error:
            self.failed_temporarily = True
            # Its message may contain the URL of the index.
            self._report(f"The package index does not answer ({type(error).__name__}).")
            log.warning("packages.index_failed", error=str(error) or repr(error))
            raise RequestRefused(502, "The package index does not answer.") from None

    async def _route(self, connection: ClientConnection, request: h11.Request) -> None:
        method, target = request.method.decode(), request.target.decode("ascii", "replace")
        if method not in ("GET", "HEAD"):
            raise RequestRefused(403, "Only GET and HEAD.")
        if found := SIMPLE.fullmatch(target):
            async with self._pages:
                await self._page(connection, found[1])
        elif found := FILES.fullmatch(target):
            await self._file(connection, request, found[1], unquote(found[2]))
        else:
            raise RequestRefused(403, "Only the package index can be reached from here.")

    # Pages

    async def _page(self, connection: ClientConnection, name: str) -> None:
        if canonicalize_name(name) != name:
            raise RequestRefused(403, "Invalid package name.")
        url = self._index.page(name)
        async with self._asked("GET", url, {"Accept": ACCEPT}) as response:
            if response.status_code in (404, 410):
                raise RequestRefused(404, "No such package.")
            self._check(response, f"for {name}")
            content = await _read(response, PAGE_LIMIT)
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            at = str(response.url)
        try:
            page = await self._links.rewrite(name, content, kind, at)
        except UnreadablePage:
            self._report(f"The page of {name} on the package index is malformed or too large.")
            raise RequestRefused(502, "The index's page is malformed or too large.") from None
        await connection.respond(200, JSON_PAGE, page)

    # Files

    async def _file(
        self, connection: ClientConnection, request: h11.Request, token: str, name: str
    ) -> None:
        file = self._links.get(token)
        if file is None or name not in (file.name, file.name + METADATA):
            raise RequestRefused(403, "No page of the index links there.")
        url, limit = file.url, MAX_FILE_SIZE
        if name != file.name:
            if not file.metadata:
                raise RequestRefused(404, "The index has no metadata for this file.")
            parts = urlsplit(url)
            url = parts._replace(path=parts.path + METADATA).geturl()
            limit = METADATA_LIMIT
        headers = {}
        for key, value in request.headers:
            if key == b"range" and RANGE.fullmatch(value.decode("ascii", "replace")):
                headers["Range"] = value.decode()
        method = request.method.decode()
        async with self._asked(method, url, headers) as response:
            if response.status_code in (404, 410, 416):
                raise RequestRefused(response.status_code, "The index does not have this file.")
            self._check(response, f"for {name}")
            announced = response.headers.get("content-length", "")
            if announced.isdecimal() and int(announced[:MAX_DIGITS]) > limit:
                self._report(f"{name} is larger than the allowed {limit} bytes.")
                raise RequestRefused(413, "Too large.")
            passed = [(key, response.headers[key]) for key in PASSED if key in response.headers]
            download = None
            if method == "GET" and response.status_code == 200 and name.endswith(WHEEL):
                download = self._downloads.begin(file)
            try:
                await connection.start(response.status_code, passed)
                if method == "GET":
                    await self._pass_on(connection, response, name, limit, download)
                await connection.end()
            finally:
                if download is not None:
                    await asyncio.shield(asyncio.to_thread(download.drop))

    async def _pass_on(
        self,
        connection: ClientConnection,
        response: httpx.Response,
        name: str,
        limit: int,
        download: WheelDownload | None,
    ) -> None:
        sent, last = 0, b""
        async for data in response.aiter_raw(CHUNK_SIZE):
            sent += len(data)
            self._left -= len(data)
            if sent > limit or self._left < 0:
                self._report(f"The download limit was exceeded at {name}.")
                raise RequestRefused(413, "Too large.")
            if download is not None:
                await self._stored(name, download.write, data)
            if last:
                await connection.send(last)
            last = data
        # Before the last piece is sent: the sandbox never has a complete file with a wrong hash.
        if download is not None and not await self._stored(name, download.finish):
            self._report(f"{name} does not match the hashes of the package index.")
            raise RequestRefused(502, "The file does not match its hash.")
        if last:
            await connection.send(last)

    async def _stored(self, name: str, work: Callable[..., T], *arguments: bytes) -> T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except OSError as error:
            self.failed_temporarily = True
            self._report(f"{name} could not be stored on this node: {error.strerror}.")
            raise RequestRefused(502, "The file could not be stored.") from error

    # Upstream

    def _asked(
        self, method: str, url: str, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[httpx.Response]:
        assert self._client is not None
        return package_proxy.forward(
            self._client,
            method,
            url,
            headers,
            auth=self._index.auth_for,
            destinations=self._destinations,
        )

    async def _destinations(self, url: str) -> list[Destination]:
        try:
            return await self._hosts.destinations(url)
        except RequestRefused:
            self._report(
                f"The package index links to {urlsplit(url).hostname}, whose address is not public."
                " Add it to ATOLL_PACKAGES__PRIVATE_HOSTS to allow this."
            )
            raise

    def _check(self, response: httpx.Response, what: str) -> None:
        if response.is_redirect:
            self._report(f"The package index redirects {what} to another host, which is refused.")
            raise RequestRefused(403, "The index redirects to another host.")
        if response.status_code not in (200, 206):
            self.failed_temporarily |= response.status_code >= 500 or response.status_code == 429
            self._report(f"The package index answered {response.status_code} {what}.")
            raise RequestRefused(502, f"The index answered {response.status_code}.")


async def _read(response: httpx.Response, limit: int) -> bytes:
    content = bytearray()
    async for data in response.aiter_raw(CHUNK_SIZE):
        content += data
        if len(content) > limit:
            raise RequestRefused(413, "The page is too large.")
    return bytes(content)
