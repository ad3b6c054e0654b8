"""
Files of one session.

Paths are relative to the workspace; `/workspace/a` is the same as `a`. Uploads and downloads, also
of directories, use constant memory. Files are replaced atomically on both sides.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

from atoll.errors import InvalidRequest, NotFound, TemporaryError
from atoll.sdk.arguments import wrong_type
from atoll.sdk.decode import decode
from atoll.sdk.file_transfer import (
    Download,
    ProgressCallback,
    ProgressMeter,
    Source,
    Upload,
    in_thread,
    save,
    write_to,
)
from atoll.sdk.file_watch import watch
from atoll.sdk.paths import json_path, url_path, workspace_path
from atoll.sdk.values import Artifact, Entry, FileEvent, Link, Match, Tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.tar_pack import TarPacker

_TREE_TIMEOUT = 600.0
"""Seconds beyond the usual timeout for requests that concern a directory tree."""


class AsyncFiles:
    """Files of the workspace of a session."""

    def __init__(self, http: HttpClient, session_path: str) -> None:
        self._http = http
        self._path = f"{session_path}/files"

    async def write(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        overwrite: bool = True,
        if_match: str | None = None,
    ) -> Entry:
        """
        Create or replace a file, and create its parent directories. Text is written as UTF-8.

        `mode` is like 0o755. With `overwrite=False` the file must not exist; with `if_match` its
        `etag` must be that one. Otherwise raises `RequestError` with the code
        `precondition_failed`.
        """
        content = data.encode() if isinstance(data, str) else _bytes(data)
        return await self._http.fetch(
            Entry,
            "PUT",
            self._url(path),
            body=content,
            query={"mode": None if mode is None else _octal(mode)},
            headers=_conditions(overwrite, if_match),
        )

    async def read(self, path: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """
        Content of a file, or the slice from `start` to `stop`. A negative `start` counts from the
        end.
        """
        content = bytearray()
        download = Download(self._http, self._url(path), start, stop)
        async with aclosing(aiter(download)) as pieces:
            async for piece in pieces:
                content += piece
        return bytes(content)

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Content of a file as text."""
        return (await self.read(path)).decode(encoding)

    async def stream(
        self, path: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Content of a file in chunks. See `read`."""
        download = Download(self._http, self._url(path), start, stop)
        async with aclosing(aiter(download)) as pieces:
            async for piece in pieces:
                yield piece

    def list(
        self, path: str = "", *, recursive: bool = False, glob: str | None = None
    ) -> AsyncIterator[Entry]:
        """
        Entries of a directory, sorted by name. Pages are fetched as needed.

        `recursive` includes subdirectories. `glob` filters by a pattern relative to `path`: `*`,
        `?` and `[…]` match within a name, `**` matches any directories.
        """
        query = {
            "path": workspace_path(path),
            "recursive": "true" if recursive else None,
            "glob": glob,
        }
        return self._http.items(Entry, self._path, query)

    def search(
        self,
        query: str,
        path: str = "",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
    ) -> AsyncIterator[Match]:
        """
        Lines of text files in a directory tree that contain `query`, or match it as a regular
        expression. Yields the first match of each line. `glob` works as in `list`.
        """
        asked = {
            "query": query,
            "path": workspace_path(path),
            "regex": "true" if regex else None,
            "ignore_case": "true" if ignore_case else None,
            "glob": glob,
        }
        return self._http.items(Match, f"{self._path}/search", asked)

    async def watch(self, path: str = "", *, recursive: bool = True) -> AsyncIterator[FileEvent]:
        """
        Changes in a directory, and with `recursive` in its subdirectories, until the directory is
        removed. The first event is `watching`. After a lost connection the stream continues with
        `overflow`, because events may be missing.
        """
        query = {"path": workspace_path(path), "recursive": "true" if recursive else "false"}
        async with aclosing(watch(self._http, f"{self._path}/watch", query)) as events:
            async for event in events:
                yield event

    async def stat(self, path: str) -> Entry:
        """Metadata of a file or directory. Raises `NotFound` if it does not exist."""
        return await self._http.fetch(Entry, "GET", self._url(path), query={"metadata": "true"})

    async def exists(self, path: str) -> bool:
        """Whether a file or directory exists."""
        try:
            await self.stat(path)
        except NotFound as error:
            if error.code != "file_not_found":
                raise
            return False
        return True

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` also a directory's contents."""
        query = {"recursive": "true" if recursive else None}
        await self._http.call("DELETE", self._url(path), query=query, wait=_TREE_TIMEOUT)

    async def mkdir(self, path: str, *, parents: bool = True) -> Entry:
        """Create a directory. With `parents=False` it must not exist, but its parent must."""
        return await self._change("mkdir", {"path": json_path(path), "parents": parents})

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Move or rename a file or directory. Replaces an existing target only with `overwrite`."""
        return await self._change("move", _transfer_body(source, target, overwrite))

    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Copy a file, or a directory with its contents, within the session."""
        return await self._change("copy", _transfer_body(source, target, overwrite))

    async def chmod(self, path: str, mode: int) -> Entry:
        """Set the mode, like 0o755."""
        return await self._change("chmod", {"path": json_path(path), "mode": _octal(mode)})

    async def presign(
        self,
        path: str,
        *,
        method: Literal["GET", "PUT"] = "GET",
        expires_in: int = 3600,
        filename: str | None = None,
        direct: bool = False,
    ) -> Link:
        """
        Create a link that lets everyone who has it read (`GET`) or write (`PUT`) one file for
        `expires_in` seconds, without a key. It cannot be revoked. `filename` is the name of a
        download. With `direct` a PUT goes directly to the blob store, if it supports that; see
        `Link.complete_url`.
        """
        body = {
            "path": json_path(path),
            "method": method,
            "expires_in": expires_in,
            "direct": direct,
            **({} if filename is None else {"filename": filename}),
        }
        return await self._http.fetch(
            Link, "POST", f"{self._path}/presign", body=body, wait=_TREE_TIMEOUT
        )

    async def upload(
        self,
        source: Source,
        path: str | None = None,
        *,
        mode: int | None = None,
        overwrite: bool = True,
        progress: ProgressCallback | None = None,
    ) -> Entry:
        """
        Upload a local file to `path`, by default under its own name. `source` is a local path, an
        open binary file, bytes, or an iterator of bytes. All but a local path need a `path`. They
        are read in another thread and not closed.

        `progress` is called with the number of bytes sent and the total, or None if unknown.
        """
        if path is None:
            if not isinstance(source, str | os.PathLike):
                raise InvalidRequest("path is required for this source.", field="path")
            path = Path(source).name
        upload = Upload(source, progress)
        query = {"mode": None if mode is None else _octal(mode)}
        headers = _conditions(overwrite, None)
        return decode(Entry, await self._send(path, upload, query, headers))

    @overload
    async def download(
        self,
        path: str | Artifact,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path: ...

    @overload
    async def download(
        self, path: str | Artifact, target: IO[bytes], *, progress: ProgressCallback | None = None
    ) -> None: ...

    async def download(
        self,
        path: str | Artifact,
        target: str | os.PathLike[str] | IO[bytes],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path | None:
        """
        Download a file and return its local path. `target` is a local path, or a directory if it
        is one or ends with `/`, or an open binary file, which is not closed. After a lost
        connection the download resumes. If the file has changed meanwhile, raises `Conflict` with
        the code `file_changed`.
        """
        name = path.path if isinstance(path, Artifact) else path
        download = Download(self._http, self._url(name))
        if not isinstance(target, str | os.PathLike):
            await write_to(download, target, progress)
            return None
        local = await asyncio.to_thread(local_target, os.fspath(target), workspace_path(name))
        await save(download, local, progress)
        return local

    async def upload_tree(
        self,
        source: str | os.PathLike[str],
        path: str = "",
        *,
        progress: ProgressCallback | None = None,
    ) -> Tree:
        """
        Upload the contents of a local directory to the directory `path`, which is created if
        needed. Either everything is uploaded or nothing. Directories are merged, files replaced.
        Links and modes are kept; pipes, sockets and devices are skipped. Uses one request.
        """
        from atoll.sdk.tar_pack import TarPacker, measure

        top = Path(source)
        packer = TarPacker(top)
        total = None if progress is None else await asyncio.to_thread(measure, top)
        upload = Upload(_packed(packer, ProgressMeter(progress, total)), None)
        await self._send(path, upload, {"archive": "tar"}, {}, _TREE_TIMEOUT)
        return Tree(workspace_path(path), packer.files, packer.size, tuple(packer.left_out))

    async def download_tree(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Tree:
        """
        Download the contents of a directory to the local directory `target`, which is created if
        needed. Nothing is written outside of it, and no local link is followed. Directories are
        merged, files replaced atomically. Links that could point outside are skipped.
        """
        from atoll.sdk.tar_unpack import TarUnpacker

        meter, unpacker = ProgressMeter(progress), None
        try:
            async with self._http.stream(
                "GET",
                self._url(path),
                query={"archive": "tar"},
                headers={"accept-encoding": "identity"},
            ) as response:
                unpacker = await in_thread(TarUnpacker, Path(target))
                async for piece in response.aiter_raw(1024 * 1024):
                    await in_thread(unpacker.feed, piece)
                    await meter.at(unpacker.size)
            await in_thread(unpacker.finish)
        finally:
            if unpacker is not None:
                await in_thread(unpacker.close)
        return Tree(os.fspath(target), unpacker.files, unpacker.size, tuple(unpacker.left_out))

    async def _send(
        self,
        path: str,
        upload: Upload,
        query: dict[str, Any],
        headers: dict[str, str],
        wait: float = 0.0,
    ) -> Any:
        try:
            return await self._http.call(
                "PUT", self._url(path), body=upload, query=query, headers=headers, wait=wait
            )
        except TemporaryError:
            if upload.failure is not None:
                raise upload.failure from None
            raise

    async def _change(self, verb: str, body: dict[str, Any]) -> Entry:
        path = f"{self._path}/{verb}"
        return await self._http.fetch(Entry, "POST", path, body=body, wait=_TREE_TIMEOUT)

    def _url(self, path: str) -> str:
        return f"{self._path}/{url_path(path)}"


async def _packed(packer: TarPacker, meter: ProgressMeter) -> AsyncIterator[bytes]:
    pieces = iter(packer)
    while piece := await in_thread(next, pieces, b""):
        yield piece
        await meter.at(packer.size)


def _transfer_body(source: str, target: str, overwrite: bool) -> dict[str, Any]:
    return {"source": json_path(source), "target": json_path(target), "overwrite": overwrite}


def _bytes(data: object) -> bytes:
    try:
        # Through a view, because bytes(3) would be three zeros.
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type("data", "bytes or a string", data) from None


def _octal(mode: int) -> str:
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise wrong_type("mode", "a number like 0o755", mode)
    if not 0 <= mode <= 0o777:
        raise InvalidRequest("mode must be between 0 and 0o777.", field="mode")
    return f"{mode:04o}"


def _conditions(overwrite: bool, if_match: str | None) -> dict[str, str]:
    headers = {} if if_match is None else {"if-match": if_match}
    return headers if overwrite else headers | {"if-none-match": "*"}


def local_target(target: str, path: str) -> Path:
    """Where to save `path`: at `target`, or in it if it is a directory or ends with a slash."""
    local = Path(target)
    if target.endswith("/"):
        local.mkdir(parents=True, exist_ok=True)
    return local / _file_name(path) if local.is_dir() else local


def _file_name(path: str) -> str:
    """Name of a downloaded file in a local directory."""
    name = path.rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..") or "\0" in name:
        raise InvalidRequest(f"{path!r} is not the name of a file.", code="unsafe_name")
    return name
