"""
A session's files.

Every path is resolved by the executor, inside the instance and beneath the workspace: the control
plane never opens a file of user code. A path is text in which each byte that is not UTF-8 stands as
a lone surrogate (PEP 383); what may leave by JSON is for the API to say.

What was kept of a session that has ended, or whose node cannot be reached, is read from `Kept`.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from atoll.errors import (
    AtollError,
    NodeUnreachable,
    SessionEnded,
    SessionNotReady,
    WorkspaceLost,
)
from atoll.link.errors import LinkLost, ProtocolViolation
from atoll.link.messages import MAX_NOTICE, FileEntry, notice
from atoll.model.page import Page
from atoll.model.times import moment
from atoll.service import cursors
from atoll.service.files.types import ByteRange, Download, FileInfo, SearchMatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.service.files.checkpoint_files import CheckpointFiles
    from atoll.service.sessions.connections import Connection, Connections

    Tags = list[str] | None

MAX_LIST = 1000
TREE_SECONDS = 5.0
"""For a page of a tree; a page that is not full then is not the last."""
SEARCH_SECONDS = 10.0

_CHANGES = {"mkdir", "move", "chmod", "remove"}
_AWAY = (SessionEnded, NodeUnreachable, SessionNotReady, WorkspaceLost, LinkLost)
"""Errors of a session whose files are not to be had where they were."""

WORK_TIMEOUT = timedelta(minutes=10)
"""How long an executor may take to copy files, or to unpack an archive that it was sent."""


class WorkspaceObserver(Protocol):
    def workspace_changed(self, session_id: str) -> None:
        """Files of the session may have changed. The call must neither block nor raise."""


class Files:
    def __init__(
        self,
        connections: Connections,
        driver: Driver,
        *,
        work_timeout: timedelta = WORK_TIMEOUT,
        checkpoint_files: CheckpointFiles | None = None,
    ) -> None:
        self._connections = connections
        self._driver = driver
        self._work_timeout = work_timeout
        self._checkpoint_files = checkpoint_files
        self._observers: list[WorkspaceObserver] = []

    def subscribe(self, observer: WorkspaceObserver) -> None:
        self._observers.append(observer)

    # Looking

    async def list(
        self, session_id: str, path: str, *, cursor: str | None, limit: int
    ) -> Page[FileInfo]:
        after, limit = cursors.read("n", cursor), min(limit, MAX_LIST)
        try:
            answer = await self._call(session_id, "list", path=path, after=after, limit=limit)
        except AtollError as error:
            kept = None
            if self._checkpoint_files is not None and isinstance(error, _AWAY):
                kept = await self._checkpoint_files.list(session_id, path, after=after, limit=limit)
            if kept is None:
                raise
            return Page(tuple(kept[0]), cursors.written("n", kept[1]))
        entries = tuple(_entry(item) for item in answer["entries"])
        return Page(entries, cursors.written("n", answer["next"]))

    async def tree(
        self, session_id: str, path: str, *, glob: str | None, cursor: str | None, limit: int
    ) -> Page[FileInfo]:
        """
        What is below a directory, or those that match a pattern, each directory before what is in
        it. A page may have fewer than `limit` and not be the last.
        """
        answer = await self._call(
            session_id,
            "tree",
            path=path,
            glob=glob,
            after=cursors.read("t", cursor),
            limit=min(limit, MAX_LIST),
            seconds=TREE_SECONDS,
        )
        entries = tuple(_entry(item) for item in answer["entries"])
        return Page(entries, cursors.written("t", answer["next"]))

    async def search(
        self,
        session_id: str,
        path: str,
        query: str,
        *,
        regex: bool,
        ignore_case: bool,
        glob: str | None,
        cursor: str | None,
        limit: int,
    ) -> Page[SearchMatch]:
        """Lines of text that hold something; pages as in `tree`."""
        after, line = _search_place(cursor)
        answer = await self._call(
            session_id,
            "search",
            path=path,
            query=query,
            regex=regex,
            ignore_case=ignore_case,
            glob=glob,
            after=after,
            line=line,
            limit=min(limit, MAX_LIST),
            seconds=SEARCH_SECONDS,
        )
        found = tuple(SearchMatch(**match) for match in answer["matches"])
        following = answer["next"]
        place = None if following is None else json.dumps([following["path"], following["line"]])
        return Page(found, cursors.written("s", place))

    async def stat(self, session_id: str, path: str) -> FileInfo:
        return _entry((await self._call(session_id, "stat", path=path))["entry"])

    async def watch(
        self, session_id: str, path: str, *, recursive: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """
        What happens below a directory, from now on: `type`, `path`, and `from` of what was moved.
        """
        connection = await self._connections.get(session_id)
        _, content = await connection.link.fetch("follow", path=path, recursive=recursive)
        return _notices(connection.link, content)

    # Content

    async def read(
        self, session_id: str, path: str, part: ByteRange | None = None, *, head: bool = False
    ) -> Download:
        """A file and its content, which is read as fast as it is taken; with `head`, none of it."""
        try:
            connection = await self._connections.get(session_id)
            asked = None if part is None else (part.first, part.last)
            if_range = None if part is None else part.if_range
            entry, content = await connection.link.read(
                path, part=asked, if_range=if_range, head=head
            )
        except AtollError as error:
            found = await self._read_kept(session_id, path, part, head, error)
            if found is None:
                raise
            return found
        return Download(_entry(entry), entry["start"], entry["stop"], content)

    async def _read_kept(
        self, session_id: str, path: str, part: ByteRange | None, head: bool, error: AtollError
    ) -> Download | None:
        if self._checkpoint_files is None or not isinstance(error, _AWAY):
            return None
        found = await self._checkpoint_files.open(session_id, path, 0, 0)
        if found is None:
            return None
        entry = found[0]
        start, stop = _chosen(entry, part)
        content = found[1]
        if not head and start is not None and stop > start:
            again = await self._checkpoint_files.open(session_id, path, start, stop)
            if again is None:
                return None
            content = again[1]
        return Download(entry, start, stop, content)

    async def write(
        self,
        session_id: str,
        path: str,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        if_match: Tags = None,
        if_none_match: Tags = None,
    ) -> FileInfo:
        """The file is there whole, or is as it was."""
        connection = await self._connections.get(session_id)
        write = connection.link.write(
            path,
            content,
            mode=mode,
            if_match=if_match,
            if_none_match=if_none_match,
            disk=self._disk(connection),
        )
        entry: FileEntry = await self._changing(session_id, write)
        return _entry(entry)

    async def pack(self, session_id: str, path: str, form: str) -> AsyncIterator[bytes]:
        """A directory as an archive, made while it is taken."""
        connection = await self._connections.get(session_id)
        _, content = await connection.link.fetch("pack", path=path, form=form)
        found: AsyncIterator[bytes] = content
        return found

    async def unpack(
        self, session_id: str, path: str, form: str, content: AsyncIterator[bytes]
    ) -> int:
        """An archive into a directory, all of it or nothing; how many entries it had."""
        connection = await self._connections.get(session_id)
        push = connection.link.push(
            "unpack",
            content,
            path=path,
            form=form,
            disk=self._disk(connection),
            within=self._work_timeout,
        )
        return int((await self._changing(session_id, push))["entries"])

    def _disk(self, connection: Connection) -> int | None:
        """How large the workspace may be, where the executor has to see to that."""
        _, watch = self._driver.run_limits(connection.instance.handle, connection.session.resources)
        return watch.get("disk")

    # Changing

    async def mkdir(self, session_id: str, path: str, *, parents: bool) -> FileInfo:
        return _entry((await self._call(session_id, "mkdir", path=path, parents=parents))["entry"])

    async def move(self, session_id: str, source: str, target: str, *, overwrite: bool) -> FileInfo:
        answer = await self._call(
            session_id, "move", source=source, target=target, overwrite=overwrite
        )
        return _entry(answer["entry"])

    async def copy(self, session_id: str, source: str, target: str, *, overwrite: bool) -> FileInfo:
        """A file or a tree; the copy is there whole or not at all."""
        connection = await self._connections.get(session_id)
        copy = connection.link.call(
            "copy",
            within=self._work_timeout,
            source=source,
            target=target,
            overwrite=overwrite,
            disk=self._disk(connection),
        )
        return _entry((await self._changing(session_id, copy))["entry"])

    async def chmod(self, session_id: str, path: str, mode: int) -> FileInfo:
        return _entry((await self._call(session_id, "chmod", path=path, mode=mode))["entry"])

    async def remove(self, session_id: str, path: str, *, recursive: bool) -> None:
        await self._call(session_id, "remove", path=path, recursive=recursive)

    async def _call(self, session_id: str, op: str, **request: Any) -> dict[str, Any]:
        connection = await self._connections.get(session_id)
        call = connection.link.call(op, **request)
        if op not in _CHANGES:
            return await call
        return cast("dict[str, Any]", await self._changing(session_id, call))

    async def _changing(self, session_id: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        finally:
            # Also when it failed: a part of it may have been done.
            for observer in self._observers:
                observer.workspace_changed(session_id)


async def _notices(link: Link, content: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for piece in content:
        *lines, rest = (rest + piece).split(b"\n")
        try:
            if len(rest) > MAX_NOTICE:
                raise ProtocolViolation("The executor sent a notice that is too long.")
            notices = [notice(line) for line in lines]
        except ProtocolViolation as violation:
            link.violated(violation)
            raise
        for found in notices:
            yield found


def _chosen(entry: FileInfo, part: ByteRange | None) -> tuple[int | None, int]:
    """As the executor does it."""
    if part is None or part.if_range not in (None, entry.etag):
        return 0, entry.size
    first, last = part.first, part.last
    if first is None:
        first, last = max(0, entry.size - (last or 0)), None
    stop = entry.size if last is None else min(entry.size, last + 1)
    return (first, stop) if first < stop else (None, 0)


def _search_place(cursor: str | None) -> tuple[str | None, int]:
    """The file and the line to go on behind."""
    place = cursors.read("s", cursor)
    if place is None:
        return None, 0
    try:
        path, line = json.loads(place)
    except (ValueError, TypeError, RecursionError):
        raise cursors.bad() from None
    if not (isinstance(path, str) and isinstance(line, int)):
        raise cursors.bad()
    return path, line


def _entry(item: FileEntry) -> FileInfo:
    return FileInfo(
        path=item["path"],
        type=item["type"],
        size=item["size"],
        mode=item["mode"],
        modified_at=moment(item["modified"]),
        etag=item["etag"] if item["type"] == "file" else None,
    )
