"""
The files of one session.

Paths are relative to the workspace; `/workspace/a` is the same as `a`. `upload` and `download` use
the same small memory whatever the size, and a download is either there as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import IO, TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.paths import encoded, workspace_path
from atoll.sdk.values import Entry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.connection import Connection

_CHUNK = 256 * 1024


class AsyncFiles:
    """The workspace of a session."""

    def __init__(self, connection: Connection, session_path: str) -> None:
        self._connection = connection
        self._path = f"{session_path}/files"

    async def write(self, path: str, data: bytes | str) -> Entry:
        """Make or replace a file, and the directories it lies in; text is written as UTF-8."""
        content = data.encode() if isinstance(data, str) else data
        answer = await self._connection.call("PUT", self._url(path), content=content)
        return decode(Entry, answer)

    async def read(self, path: str) -> bytes:
        async with self._connection.stream("GET", self._url(path)) as response:
            return await response.aread()

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return (await self.read(path)).decode(encoding)

    async def list(self, path: str = "") -> AsyncIterator[Entry]:
        """What lies in a directory; pages are fetched as they are needed."""
        async for item in self._connection.pages(self._path, {"path": workspace_path(path)}):
            yield decode(Entry, item)

    async def stat(self, path: str) -> Entry:
        answer = await self._connection.call("GET", self._url(path), query={"metadata": "true"})
        return decode(Entry, answer)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all in it."""
        query = {"recursive": "true" if recursive else None}
        await self._connection.call("DELETE", self._url(path), query=query)

    async def mkdir(self, path: str, *, parents: bool = True) -> Entry:
        body = {"path": workspace_path(path), "parents": parents}
        return decode(Entry, await self._connection.call("POST", f"{self._path}/mkdir", body=body))

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        body = {
            "source": workspace_path(source),
            "target": workspace_path(target),
            "overwrite": overwrite,
        }
        return decode(Entry, await self._connection.call("POST", f"{self._path}/move", body=body))

    async def upload(self, local_path: str | os.PathLike[str], path: str | None = None) -> Entry:
        """Copy a file of this machine to `path`, by default under its own name."""
        local = Path(local_path)
        file = await asyncio.to_thread(local.open, "rb")
        try:
            answer = await self._connection.call(
                "PUT", self._url(local.name if path is None else path), content=_chunks(file)
            )
        finally:
            await asyncio.to_thread(file.close)
        return decode(Entry, answer)

    async def download(self, path: str, local_path: str | os.PathLike[str]) -> Path:
        """Copy a file to this machine, into `local_path` if that is a directory; says where to."""
        local = Path(local_path)
        if await asyncio.to_thread(local.is_dir):
            local /= Path(workspace_path(path)).name
        part = local.with_name(f".{local.name[:200]}.{secrets.token_hex(4)}.part")
        async with self._connection.stream("GET", self._url(path)) as response:
            file = await asyncio.to_thread(part.open, "xb")
            try:
                try:
                    async for chunk in response.aiter_bytes(_CHUNK):
                        await asyncio.to_thread(file.write, chunk)
                finally:
                    await asyncio.to_thread(file.close)
                await asyncio.to_thread(os.replace, part, local)
            except BaseException:
                await asyncio.to_thread(part.unlink, missing_ok=True)
                raise
        return local

    def _url(self, path: str) -> str:
        return f"{self._path}/{encoded(path)}"


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, _CHUNK):
        yield chunk
