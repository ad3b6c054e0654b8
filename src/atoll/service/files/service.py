"""
Reads and changes the files of a session.

The executor resolves every path, inside the instance and below the workspace: the control plane
never opens a file of user code. A path is text in which each byte that is not UTF-8 is a lone
surrogate (PEP 383); the API encodes such paths.

Files of a session that has ended, or whose node is unreachable, are read from its last checkpoint.
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
from atoll.model.file_times import file_time
from atoll.model.page import Page
from atoll.service import cursors
from atoll.service.files.types import ByteRange, Download, FileInfo, Search, SearchMatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.service.files.checkpoint_files import CheckpointFiles
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection

    Etags = list[str] | None

MAX_LIST = 1000
TREE_SECONDS = 5.0
"""Time limit for a page of a tree; a page that is not full is then not necessarily the last."""
SEARCH_SECONDS = 10.0
WORK_TIMEOUT = timedelta(minutes=10)
"""Time limit for copying files, and for unpacking an archive."""

_CHANGES = {"mkdir", "move", "chmod", "remove"}
_UNREACHABLE = (SessionEnded, NodeUnreachable, SessionNotReady, WorkspaceLost, LinkLost)
"""Errors of a session whose files may still be in a checkpoint."""


class WorkspaceObserver(Protocol):
    def workspace_changed(self, session_id: str) -> None:
        """Files of the session may have changed. The call must neither block nor raise."""


class Files:
    def __init__(
        self,
        sessions: SessionAccess,
        driver: Driver,
        *,
        work_timeout: timedelta = WORK_TIMEOUT,
        checkpoint_files: CheckpointFiles | None = None,
    ) -> None:
        self._sessions = sessions
        self._driver = driver
        self._work_timeout = work_timeout
        self._checkpoint_files = checkpoint_files
        self._observers: list[WorkspaceObserver] = []

    def subscribe(self, observer: WorkspaceObserver) -> None:
        self._observers.append(observer)

    # Directories

    async def list(
        self, session_id: str, path: str, *, cursor: str | None, limit: int
    ) -> Page[FileInfo]:
        after, limit = cursors.decode("n", cursor), min(limit, MAX_LIST)
        try:
            answer = await self._call(session_id, "list", path=path, after=after, limit=limit)
        except AtollError as error:
            stored = None
            if self._checkpoint_files is not None and isinstance(error, _UNREACHABLE):
                stored = await self._checkpoint_files.list(
                    session_id, path, after=after, limit=limit
                )
            if stored is None:
                raise
            return Page(tuple(stored[0]), cursors.encode("n", stored[1]))
        entries = tuple(_info(item) for item in answer["entries"])
        return Page(entries, cursors.encode("n", answer["next"]))

    async def tree(
        self, session_id: str, path: str, *, glob: str | None, cursor: str | None, limit: int
    ) -> Page[FileInfo]:
        """
        Everything below a directory, or what matches a pattern; a directory comes before its
        entries. A page may have fewer than `limit` entries although others follow.
        """
        answer = await self._call(
            session_id,
            "tree",
            path=path,
            glob=glob,
            after=cursors.decode("t", cursor),
            limit=min(limit, MAX_LIST),
            seconds=TREE_SECONDS,
        )
        entries = tuple(_info(item) for item in answer["entries"])
        return Page(entries, cursors.encode("t", answer["next"]))

    async def search(
        self, session_id: str, path: str, search: Search, *, cursor: str | None, limit: int
    ) -> Page[SearchMatch]:
        """Lines of text files that match; pages as in `tree`."""
        after, line = _search_position(cursor)
        answer = await self._call(
            session_id,
            "search",
            path=path,
            query=search.query,
            regex=search.regex,
            ignore_case=search.ignore_case,
            glob=search.glob,
            after=after,
            line=line,
            limit=min(limit, MAX_LIST),
            seconds=SEARCH_SECONDS,
        )
        matches = tuple(SearchMatch(**match) for match in answer["matches"])
        following = answer["next"]
        position = None if following is None else json.dumps([following["path"], following["line"]])
        return Page(matches, cursors.encode("s", position))

    async def stat(self, session_id: str, path: str) -> FileInfo:
        return _info((await self._call(session_id, "stat", path=path))["entry"])

    async def watch(
        self, session_id: str, path: str, *, recursive: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Changes below a directory, from now on: `type`, `path`, and `from` of a move."""
        connection = await self._sessions.starter.connect(session_id)
        _, content = await connection.link.fetch("follow", path=path, recursive=recursive)
        return _notices(connection.link, content)

    # Content

    async def read(
        self, session_id: str, path: str, part: ByteRange | None = None, *, head: bool = False
    ) -> Download:
        """A file and its content, streamed; with `head`, without content."""
        try:
            connection = await self._sessions.starter.connect(session_id)
            asked = None if part is None else (part.first, part.last)
            if_range = None if part is None else part.if_range
            entry, content = await connection.link.read(
                path, part=asked, if_range=if_range, head=head
            )
        except AtollError as error:
            found = None
            if isinstance(error, _UNREACHABLE):
                found = await self._read_from_checkpoint(session_id, path, part, head)
            if found is None:
                raise
            return found
        return Download(_info(entry), entry["start"], entry["stop"], content)

    async def _read_from_checkpoint(
        self, session_id: str, path: str, part: ByteRange | None, head: bool
    ) -> Download | None:
        if self._checkpoint_files is None:
            return None
        found = await self._checkpoint_files.open(session_id, path, 0, 0)
        if found is None:
            return None
        info, content = found
        start, stop = _resolve(part, info)
        if not head and start is not None and stop > start:
            again = await self._checkpoint_files.open(session_id, path, start, stop)
            if again is None:
                return None
            content = again[1]
        return Download(info, start, stop, content)

    async def write(
        self,
        session_id: str,
        path: str,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        if_match: Etags = None,
        if_none_match: Etags = None,
    ) -> FileInfo:
        """Atomic: the file is replaced completely or stays unchanged."""
        connection = await self._sessions.starter.connect(session_id)
        write = connection.link.write(
            path,
            content,
            mode=mode,
            if_match=if_match,
            if_none_match=if_none_match,
            disk=self._disk(connection),
        )
        entry: FileEntry = await self._changing(session_id, write)
        return _info(entry)

    async def pack(self, session_id: str, path: str, form: str) -> AsyncIterator[bytes]:
        """A directory as an archive, which is made while it is read."""
        connection = await self._sessions.starter.connect(session_id)
        _, content = await connection.link.fetch("pack", path=path, form=form)
        found: AsyncIterator[bytes] = content
        return found

    async def unpack(
        self, session_id: str, path: str, form: str, content: AsyncIterator[bytes]
    ) -> int:
        """Unpack an archive into a directory, atomically; the number of its entries."""
        connection = await self._sessions.starter.connect(session_id)
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
        """Size limit of the workspace, if the executor has to enforce it."""
        handle, resources = connection.instance.handle, connection.session.resources
        _, watch = self._driver.limits.executor_limits(handle, resources)
        return watch.get("disk")

    # Changing

    async def mkdir(self, session_id: str, path: str, *, parents: bool) -> FileInfo:
        return _info((await self._call(session_id, "mkdir", path=path, parents=parents))["entry"])

    async def move(self, session_id: str, source: str, target: str, *, overwrite: bool) -> FileInfo:
        answer = await self._call(
            session_id, "move", source=source, target=target, overwrite=overwrite
        )
        return _info(answer["entry"])

    async def copy(self, session_id: str, source: str, target: str, *, overwrite: bool) -> FileInfo:
        """Copy a file or a tree, atomically."""
        connection = await self._sessions.starter.connect(session_id)
        copy = connection.link.call(
            "copy",
            within=self._work_timeout,
            source=source,
            target=target,
            overwrite=overwrite,
            disk=self._disk(connection),
        )
        return _info((await self._changing(session_id, copy))["entry"])

    async def chmod(self, session_id: str, path: str, mode: int) -> FileInfo:
        return _info((await self._call(session_id, "chmod", path=path, mode=mode))["entry"])

    async def remove(self, session_id: str, path: str, *, recursive: bool) -> None:
        await self._call(session_id, "remove", path=path, recursive=recursive)

    async def _call(self, session_id: str, op: str, **request: Any) -> dict[str, Any]:
        connection = await self._sessions.starter.connect(session_id)
        call = connection.link.call(op, **request)
        if op not in _CHANGES:
            return await call
        return cast("dict[str, Any]", await self._changing(session_id, call))

    async def _changing(self, session_id: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        finally:
            # Also after a failure: a part of the change may have been made.
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


def _resolve(part: ByteRange | None, info: FileInfo) -> tuple[int | None, int]:
    """Start and stop of a range in a file, like the executor resolves it."""
    if part is None or part.if_range not in (None, info.etag):
        return 0, info.size
    first, last = part.first, part.last
    if first is None:
        first, last = max(0, info.size - (last or 0)), None
    stop = info.size if last is None else min(info.size, last + 1)
    return (first, stop) if first < stop else (None, 0)


def _search_position(cursor: str | None) -> tuple[str | None, int]:
    """The file and the line after which to continue."""
    position = cursors.decode("s", cursor)
    if position is None:
        return None, 0
    try:
        path, line = json.loads(position)
    except (ValueError, TypeError, RecursionError):
        raise cursors.bad_cursor() from None
    if not (isinstance(path, str) and isinstance(line, int)):
        raise cursors.bad_cursor()
    return path, line


def _info(item: FileEntry) -> FileInfo:
    return FileInfo(
        path=item["path"],
        type=item["type"],
        size=item["size"],
        mode=item["mode"],
        modified_at=file_time(item["modified"]),
        etag=item["etag"] if item["type"] == "file" else None,
    )
