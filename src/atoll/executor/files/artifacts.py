"""
Finds the files that a run made or changed: its artifacts.

A file's change time decides, which user code cannot set. It is as coarse as the kernel's tick, so
files that were listed or uploaded in the tick before the start are remembered and left out unless
they changed again. A workspace that is mounted from a bucket has times in whole seconds; there the
same is done with the second before. Each run causes one walk, of at most `MAX_WALK` entries.
"""

from __future__ import annotations

import os
import stat
import time

from ...protocol import minijson
from .paths import STAGING, UPLOAD, FileError
from .removal import TRASH
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Key = tuple[int, int]
    """Inode and change time."""

MAX_WALK = 100_000
MAX_DEPTH = 64
MAX_LIST = 768 * 1024
"""Maximum size of a list as JSON, in bytes, so that the result fits into one frame."""
DIGEST = 64
"""Characters of a checksum, which is added later."""
MAX_HASHED = 64 * 1024 * 1024
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000


def coarse_now() -> int:
    """The current time of the clock that the kernel uses for file times."""
    return time.clock_gettime_ns(5)  # CLOCK_REALTIME_COARSE


def at_or_after(changed: int, moment: int) -> bool:
    """Whether a file with this change time may have changed at `moment` or later."""
    return changed >= moment or (changed % SECOND_NS == 0 and changed + SECOND_NS > moment)


class ArtifactScanner:
    def __init__(self, root: str) -> None:
        self._root = root
        self._recent: dict[str, Key] = {}

    def remember(self, path: str) -> None:
        """Exclude a file that no run has changed, such as an upload."""
        try:
            status = os.lstat(os.path.join(self._root, path))
        except OSError:
            return  # It was removed already.
        self._recent[path] = (status.st_ino, status.st_ctime_ns)

    def changed_since(self, start: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Files changed at or after `start`, by path, and whether some were left out."""
        found: list[tuple[str, os.stat_result]] = []
        seen, cut = 0, False
        stack = [("", 0)]
        while stack:
            directory, depth = stack.pop()
            try:
                items = os.scandir(os.path.join(self._root, directory))
            except OSError:
                continue  # Removed, or user code took away the right to read it.
            with items:
                for item in items:
                    seen += 1
                    if seen > MAX_WALK:
                        return self._result(found, limit, True)
                    path = item.name if not directory else directory + "/" + item.name
                    try:
                        if item.is_dir(follow_symlinks=False):
                            if depth < MAX_DEPTH:
                                if not item.name.startswith(TRASH) and path != STAGING:
                                    stack.append((path, depth + 1))
                            else:
                                cut = True
                            continue
                        status = item.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if (
                        at_or_after(status.st_ctime_ns, start)
                        and stat.S_ISREG(status.st_mode)
                        and not item.name.startswith(UPLOAD)
                        and self._recent.get(path) != (status.st_ino, status.st_ctime_ns)
                    ):
                        found.append((path, status))
        return self._result(found, limit, cut)

    def _result(
        self, found: list[tuple[str, os.stat_result]], limit: int, cut: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        horizon = coarse_now() - TICK_NS
        self._recent = {
            path: key for path, key in self._recent.items() if at_or_after(key[1], horizon)
        }
        for path, status in found:
            if at_or_after(status.st_ctime_ns, horizon):
                self._recent[path] = (status.st_ino, status.st_ctime_ns)
        found.sort(key=lambda item: item[0])
        listed: list[dict[str, Any]] = []
        room = MAX_LIST
        for path, status in found[:limit]:
            item: dict[str, Any] = {
                "path": path,
                "size": status.st_size,
                "modified": status.st_mtime_ns,
                "sha256": None,
            }
            room -= len(minijson.dumps(item)) + DIGEST
            if room < 0:
                break
            listed.append(item)
        return listed, cut or len(found) > len(listed)


def hash_files(workspace: Workspace, artifacts: list[dict[str, Any]]) -> None:
    """
    Add checksums. Files that would exceed `MAX_HASHED` bytes in total, and files that change while
    they are read, have none.
    """
    import hashlib  # Loads OpenSSL, which most runs never need.

    room = MAX_HASHED
    for artifact in artifacts:
        if artifact["size"] > room:
            continue
        room -= artifact["size"]
        try:
            fd, status = workspace.open(artifact["path"])
        except FileError:
            continue  # Removed meanwhile by a background process.
        with open(fd, "rb") as file:
            digest = hashlib.sha256()
            left = artifact["size"] + 1  # One more byte shows that the file has grown.
            while left > 0:
                block = file.read(min(262_144, left))
                if not block:
                    break
                digest.update(block)
                left -= len(block)
            if os.fstat(fd).st_size == status.st_size == artifact["size"]:
                artifact["sha256"] = digest.hexdigest()
