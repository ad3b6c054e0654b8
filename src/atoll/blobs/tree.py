"""
Keys that are files beneath a directory, in the order of their bytes.

A directory's names are held in memory at a time, never those of a whole tree. A name with a `#` is
no key: it belongs to something unfinished. What comes or goes meanwhile is told or not.
"""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from atoll.blobs.base import BlobInfo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def walk(root: Path, directory: str, after: str | None = None) -> Iterator[BlobInfo]:
    """Those beneath `directory` (relative, "" for all) whose key comes after `after`."""
    try:
        with os.scandir(root / directory) as entries:
            # A directory's keys go on with a slash, which not every other character is behind.
            names = sorted(
                entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name
                for entry in entries
                if "#" not in entry.name
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    base = f"{directory}/" if directory else ""
    for name in names:
        key = base + name
        if name.endswith("/"):
            # All keys in it are before `after`, or all are behind it, or it is on `after`'s way.
            if after is None or key > after or after.startswith(key):
                yield from walk(root, key[:-1], after)
        elif after is None or key > after:
            found = info_of(root, key)
            if found is not None:
                yield found


def info_of(root: Path, key: str) -> BlobInfo | None:
    try:
        found = os.lstat(root / key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return described(key, found) if stat.S_ISREG(found.st_mode) else None


def described(key: str, found: os.stat_result) -> BlobInfo:
    # As obstore makes it for local files: microseconds, cut and not rounded.
    seconds, micros = divmod(found.st_mtime_ns // 1000, 1_000_000)
    etag = f'"{found.st_ino:x}-{found.st_mtime_ns // 1000:x}-{found.st_size:x}"'
    modified = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
    return BlobInfo(key, found.st_size, etag, modified)
