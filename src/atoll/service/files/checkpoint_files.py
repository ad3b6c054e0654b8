"""
Read-only file access to sessions that cannot be reached, served from their last checkpoint.

A path is a name in the checkpoint's manifest. A symbolic link leads to another name of the
manifest or nowhere; nothing is resolved on a file system.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from atoll.model import manifest
from atoll.model.file_times import file_time
from atoll.service.files.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.service.checkpoints.service import Checkpoints

ROOT = "/workspace"
MAX_SYMLINKS = 20
_TYPES = {manifest.FILE: "file", manifest.DIRECTORY: "directory", manifest.SYMLINK: "symlink"}


class CheckpointFiles:
    def __init__(
        self, checkpoints: Checkpoints, wait_for_last_checkpoint: Callable[[str], Awaitable[None]]
    ) -> None:
        """`wait_for_last_checkpoint` waits for the checkpoint of a session that has just ended."""
        self._checkpoints = checkpoints
        self._wait_for_last_checkpoint = wait_for_last_checkpoint

    async def open(
        self, session_id: str, path: str, start: int, end: int | None
    ) -> tuple[FileInfo, AsyncIterator[bytes]] | None:
        """
        A file and its bytes from `start` up to but not including `end`; null if the checkpoint does
        not have it.
        """
        await self._wait_for_last_checkpoint(session_id)
        entry = await self._resolve(session_id, path)
        if entry is None or entry.kind != manifest.FILE:
            return None
        return _info(entry), self._checkpoints.content(session_id, entry, start, end)

    async def list(
        self, session_id: str, path: str, *, after: str | None, limit: int
    ) -> tuple[list[FileInfo], str | None] | None:
        """
        Entries of a directory in order of name, after the name `after`, and the name after which to
        continue; null if the checkpoint does not have the directory.
        """
        await self._wait_for_last_checkpoint(session_id)
        name = _name(path)
        if name is None or await self._checkpoints.get(session_id) is None:
            return None
        if name:
            directory = await self._checkpoints.find(session_id, name)
            if directory is None or directory.kind != manifest.DIRECTORY:
                return None
        prefix = f"{name}/" if name else ""
        listed: list[FileInfo] = []
        async for entry in self._checkpoints.entries(session_id, prefix + (after or "")):
            rest = entry.path.removeprefix(prefix)
            if not entry.path.startswith(prefix):
                if entry.order > prefix.split("/"):
                    break
            elif "/" not in rest and (after is None or rest > after):
                if len(listed) == limit:
                    return listed, listed[-1].name
                listed.append(_info(entry))
        return listed, None

    async def _resolve(self, session_id: str, path: str) -> manifest.Entry | None:
        name = _name(path)
        for _ in range(MAX_SYMLINKS):
            if not name:
                return None
            entry = await self._checkpoints.find(session_id, name)
            if entry is None or entry.kind != manifest.SYMLINK:
                return entry
            target = posixpath.join(ROOT, posixpath.dirname(name), entry.target)
            name = _name(posixpath.normpath(target))
        return None


def _name(path: str) -> str | None:
    """The name in the manifest; null for a path outside the workspace."""
    if path == ROOT or path.startswith(f"{ROOT}/"):
        path = path[len(ROOT) :]
    elif path.startswith("/"):
        return None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return None if ".." in parts else "/".join(parts)


def _info(entry: manifest.Entry) -> FileInfo:
    return FileInfo(
        path=entry.path,
        type=_TYPES[entry.kind],
        size=entry.size,
        mode=entry.mode,
        modified_at=file_time(entry.modified),
        etag=f"{entry.inode:x}-{entry.changed:x}-{entry.size:x}",
    )
