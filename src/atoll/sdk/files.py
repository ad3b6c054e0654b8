"""
The files of one session.

Paths are relative to the workspace; `/workspace/a` is the same as `a`. `upload` and `download`, and
those of trees, use the same small memory whatever the size. A file is there as a whole or not at
all, at both ends.
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
    pour,
    save,
)
from atoll.sdk.file_watch import watch
from atoll.sdk.paths import json_path, url_path, workspace_path
from atoll.sdk.values import Artifact, Entry, FileEvent, Link, Match, Tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.tar_pack import TarPacker

_TREE_WAIT = 600.0
"""Seconds for which a server may be busy with a tree beyond what one answer may take."""


class AsyncFiles:
    """The workspace of a session."""

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
        Make or replace a file, and the directories it lies in; text is written as UTF-8.

        `mode` is like 0o755. Without `overwrite` it must be new, with `if_match` it must be the
        version with that `etag`; else a `RequestError` (`precondition_failed`) is raised.
        """
        content = data.encode() if isinstance(data, str) else _bytes(data)
        answer = await self._http.call(
            "PUT",
            self._url(path),
            body=content,
            query={"mode": None if mode is None else _octal(mode)},
            headers=_conditions(overwrite, if_match),
        )
        return decode(Entry, answer)

    async def read(self, path: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """
        The content, or of it what a slice from `start` to `stop` has; a negative `start` counts
        from the end.
        """
        content = bytearray()
        getting = Download(self._http, self._url(path), start, stop)
        async with aclosing(aiter(getting)) as pieces:
            async for piece in pieces:
                content += piece
        return bytes(content)

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """The content as text."""
        return (await self.read(path)).decode(encoding)

    async def stream(
        self, path: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """The content in pieces, as they come; otherwise like `read`."""
        getting = Download(self._http, self._url(path), start, stop)
        async with aclosing(aiter(getting)) as pieces:
            async for piece in pieces:
                yield piece

    async def list(
        self, path: str = "", *, recursive: bool = False, glob: str | None = None
    ) -> AsyncIterator[Entry]:
        """
        What lies in a directory, by name; pages are fetched as they are needed.

        With `recursive` all that is beneath it, with `glob` what matches that, relative to `path`:
        `*`, `?` and `[…]` within a name, `**` for any directories.
        """
        query = {
            "path": workspace_path(path),
            "recursive": "true" if recursive else None,
            "glob": glob,
        }
        async for item in self._http.pages(self._path, query):
            yield decode(Entry, item)

    async def search(
        self,
        query: str,
        path: str = "",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
    ) -> AsyncIterator[Match]:
        """
        Lines of text files beneath a directory that hold `query`, or match it as a regular
        expression; the first match of each line. `glob` is as for `list`.
        """
        asked = {
            "query": query,
            "path": workspace_path(path),
            "regex": "true" if regex else None,
            "ignore_case": "true" if ignore_case else None,
            "glob": glob,
        }
        async for item in self._http.pages(f"{self._path}/search", asked):
            yield decode(Match, item)

    async def watch(self, path: str = "", *, recursive: bool = True) -> AsyncIterator[FileEvent]:
        """
        What happens in a directory and beneath it, from the first event (`watching`) on, until the
        directory is gone. A connection that is lost is made again, and `overflow` told: something
        may have happened meanwhile.
        """
        query = {"path": workspace_path(path), "recursive": "true" if recursive else "false"}
        async with aclosing(watch(self._http, f"{self._path}/watch", query)) as events:
            async for event in events:
                yield event

    async def stat(self, path: str) -> Entry:
        """What it is; raises `NotFound` when there is nothing."""
        answer = await self._http.call("GET", self._url(path), query={"metadata": "true"})
        return decode(Entry, answer)

    async def exists(self, path: str) -> bool:
        """Whether there is something of this name."""
        try:
            await self.stat(path)
        except NotFound as error:
            if error.code != "file_not_found":
                raise
            return False
        return True

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all in it."""
        query = {"recursive": "true" if recursive else None}
        await self._http.call("DELETE", self._url(path), query=query, wait=_TREE_WAIT)

    async def mkdir(self, path: str, *, parents: bool = True) -> Entry:
        """Make a directory; without `parents` what it lies in must be there, and it must not."""
        return await self._change("mkdir", {"path": json_path(path), "parents": parents})

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Give it another name; what has that name is replaced only with `overwrite`."""
        return await self._change("move", _from_to(source, target, overwrite))

    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Copy a file, or a directory with all in it, within the session."""
        return await self._change("copy", _from_to(source, target, overwrite))

    async def chmod(self, path: str, mode: int) -> Entry:
        """Set its mode, like 0o755."""
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
        A link by which whoever has it can read (`GET`) or write (`PUT`) this one file for
        `expires_in` seconds, without a key. It cannot be revoked. A download is called `filename`.
        `direct` lets a PUT go straight to the blob store, if that can; see `Link.complete_url`.
        """
        body = {
            "path": json_path(path),
            "method": method,
            "expires_in": expires_in,
            "direct": direct,
            **({} if filename is None else {"filename": filename}),
        }
        answer = await self._http.call("POST", f"{self._path}/presign", body=body, wait=_TREE_WAIT)
        return decode(Link, answer)

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
        Copy a file of this machine to `path`, by default under its own name. `source` is its path,
        or an open binary file, or bytes, or an iterator of bytes; these need a `path`, are read in
        another thread and not closed.

        `progress` is called with the bytes sent so far and, if it is known, of all.
        """
        if path is None:
            if not isinstance(source, str | os.PathLike):
                raise InvalidRequest("path: only a file by its path has a name.", field="path")
            path = Path(source).name
        sending = Upload(source, progress)
        query = {"mode": None if mode is None else _octal(mode)}
        headers = _conditions(overwrite, None)
        return decode(Entry, await self._send(path, sending, query, headers))

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
        Copy a file to this machine: into `target` if that is a directory or ends with `/`, else
        under that name, and say where to; or into an open binary file, which is not closed. A line
        that breaks is taken up where it broke, unless the file is no longer the same: `Conflict`
        (`file_changed`).
        """
        name = path.path if isinstance(path, Artifact) else path
        getting = Download(self._http, self._url(name))
        if not isinstance(target, str | os.PathLike):
            await pour(getting, target, progress)
            return None
        local = await asyncio.to_thread(_place, os.fspath(target), workspace_path(name))
        await save(getting, local, progress)
        return local

    async def upload_tree(
        self,
        source: str | os.PathLike[str],
        path: str = "",
        *,
        progress: ProgressCallback | None = None,
    ) -> Tree:
        """
        Copy what is in a directory of this machine into the directory `path`, which is made: all of
        it, or nothing. Directories are merged, files replace files. Links and modes are kept;
        pipes, sockets and devices are left out. It goes as one stream, however many files it is.
        """
        from atoll.sdk.tar_pack import TarPacker, measure

        top = Path(source)
        packer = TarPacker(top)
        total = None if progress is None else await asyncio.to_thread(measure, top)
        sending = Upload(_packed(packer, ProgressMeter(progress, total)), None)
        await self._send(path, sending, {"archive": "tar"}, {}, _TREE_WAIT)
        return Tree(workspace_path(path), packer.files, packer.size, tuple(packer.left_out))

    async def download_tree(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Tree:
        """
        Copy what is in a directory into the directory `target` of this machine, which is made.
        Nothing is written outside of that, and no link there is followed. Directories are merged,
        files replace files, each when it is whole. Links that could lead out are left out.
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
                async for piece in response.aiter_bytes(1024 * 1024):
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
        sending: Upload,
        query: dict[str, Any],
        headers: dict[str, str],
        wait: float = 0.0,
    ) -> Any:
        try:
            return await self._http.call(
                "PUT", self._url(path), body=sending, query=query, headers=headers, wait=wait
            )
        except TemporaryError:
            if sending.failure is not None:
                raise sending.failure from None
            raise

    async def _change(self, verb: str, body: dict[str, Any]) -> Entry:
        path = f"{self._path}/{verb}"
        return decode(Entry, await self._http.call("POST", path, body=body, wait=_TREE_WAIT))

    def _url(self, path: str) -> str:
        return f"{self._path}/{url_path(path)}"


async def _packed(packer: TarPacker, meter: ProgressMeter) -> AsyncIterator[bytes]:
    pieces = iter(packer)
    while piece := await in_thread(next, pieces, b""):
        yield piece
        await meter.at(packer.size)


def _from_to(source: str, target: str, overwrite: bool) -> dict[str, Any]:
    return {"source": json_path(source), "target": json_path(target), "overwrite": overwrite}


def _bytes(data: object) -> bytes:
    try:
        # By a view: bytes(3) would be three zeros.
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type("data", "bytes or a string", data) from None


def _octal(mode: int) -> str:
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise wrong_type("mode", "a number like 0o755", mode)
    if not 0 <= mode <= 0o777:
        raise InvalidRequest("mode: it is between 0 and 0o777.", field="mode")
    return f"{mode:04o}"


def _conditions(overwrite: bool, if_match: str | None) -> dict[str, str]:
    headers = {} if if_match is None else {"if-match": if_match}
    return headers if overwrite else headers | {"if-none-match": "*"}


def _place(target: str, path: str) -> Path:
    local = Path(target)
    if target.endswith("/"):
        local.mkdir(parents=True, exist_ok=True)
    return local / _last(path) if local.is_dir() else local


def _last(path: str) -> str:
    """The name under which a file is put into a directory of this machine."""
    name = path.rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..") or "\0" in name:
        raise InvalidRequest(f"{path!r} is not the name of a file.", code="unsafe_name")
    return name
