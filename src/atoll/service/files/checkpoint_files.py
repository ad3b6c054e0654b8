"""
Files of sessions that are away, out of their last checkpoints.

Nothing is resolved on a disk: a path is a name in the manifest, and a link in it leads to another
name or nowhere.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from atoll.model import manifest
from atoll.model.times import moment
from atoll.service.files.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.service.checkpoints.service import Checkpoints

ROOT = "/workspace"
MOST_LINKS = 20
_TYPES = {manifest.FILE: "file", manifest.DIRECTORY: "directory", manifest.SYMLINK: "symlink"}


class CheckpointFiles:
    def __init__(self, checkpoints: Checkpoints, left: Callable[[str], Awaitable[None]]) -> None:
        """`left` waits until a session that ends is saved."""
        self._checkpoints = checkpoints
        self._left = left

    async def open(
        self, session_id: str, path: str, start: int, end: int | None
    ) -> tuple[FileInfo, AsyncIterator[bytes]] | None:
        await self._left(session_id)
        found = await self._resolved(session_id, path)
        if found is None or found.kind != manifest.FILE:
            return None
        return _entry(found), self._checkpoints.content(session_id, found, start, end)

    async def list(
        self, session_id: str, path: str, *, after: str | None, limit: int
    ) -> tuple[list[FileInfo], str | None] | None:
        await self._left(session_id)
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
                listed.append(_entry(entry))
        return listed, None

    async def _resolved(self, session_id: str, path: str) -> manifest.Entry | None:
        name = _name(path)
        for _ in range(MOST_LINKS):
            if not name:
                return None
            found = await self._checkpoints.find(session_id, name)
            if found is None or found.kind != manifest.SYMLINK:
                return found
            target = posixpath.join(ROOT, posixpath.dirname(name), found.target)
            name = _name(posixpath.normpath(target))
        return None


def _name(path: str) -> str | None:
    """The path as the manifest has it; None when it is not beneath the workspace."""
    if path == ROOT or path.startswith(f"{ROOT}/"):
        path = path[len(ROOT) :]
    elif path.startswith("/"):
        return None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return None if ".." in parts else "/".join(parts)


def _entry(found: manifest.Entry) -> FileInfo:
    return FileInfo(
        path=found.path,
        type=_TYPES[found.kind],
        size=found.size,
        mode=found.mode,
        modified_at=moment(found.modified),
        etag=f"{found.inode:x}-{found.changed:x}-{found.size:x}",
    )
