"""
Lists the files beneath a directory as keys, in the order of their bytes.

Memory holds the names of one directory at a time, never those of a tree. A name with a `#` is not a
key: it belongs to an unfinished write. Files that appear or vanish meanwhile may be listed or not.
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
    """The blobs beneath `directory` (relative, "" for all) whose key comes after `after`."""
    try:
        with os.scandir(root / directory) as entries:
            # Keys in a directory continue with a slash, and some characters sort before a slash.
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
            # Its keys are all before `after`, or all after it, or it contains `after`.
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
    return describe(key, found) if stat.S_ISREG(found.st_mode) else None


def describe(key: str, found: os.stat_result) -> BlobInfo:
    # Like obstore for local files: microseconds, truncated.
    seconds, micros = divmod(found.st_mtime_ns // 1000, 1_000_000)
    etag = f'"{found.st_ino:x}-{found.st_mtime_ns // 1000:x}-{found.st_size:x}"'
    modified = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
    return BlobInfo(key, found.st_size, etag, modified)
