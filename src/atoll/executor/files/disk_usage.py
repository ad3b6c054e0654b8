"""Measures the disk space of a workspace, whatever user code does to it meanwhile."""

from __future__ import annotations

import os
import stat

from . import removal

MAX_WALK = 200_000
BLOCK = 4096


def disk_use(root: str) -> tuple[int, bool]:
    """
    Bytes that the tree's files occupy, counting each inode once and at least one block for it; and
    whether that is complete, or the tree has more files than are measured.

    Moves by descriptors, because a path may be longer than the kernel accepts. No change that user
    code makes to the tree meanwhile is an error.
    """
    total = seen = 0
    linked: set[int] = set()
    levels: list[tuple[int, list[str]]] = []
    here = _enter(None, root)
    try:
        while here >= 0:
            size, count, names = _measure_directory(here, linked, MAX_WALK - seen)
            total += size
            seen += count
            levels.append((os.fstat(here).st_ino, names))
            below = -1
            while below < 0:
                if seen >= MAX_WALK:
                    return total, False
                names = levels[-1][1]
                if names:
                    below = _enter(here, names.pop())
                    continue
                levels.pop()
                if not levels:
                    return total, True
                above = _leave(here, levels[-1][0])
                os.close(here)
                here = above
                if here < 0:
                    # Moved or closed by user code meanwhile: continue from the top.
                    del levels[1:]
                    here = _enter(None, root)
                    if here < 0:
                        return total, False
            os.close(here)
            here = below
        return total, False
    finally:
        if here >= 0:
            os.close(here)


def _enter(here: int | None, name: str) -> int:
    """
    Open a directory in a directory; -1 if it is gone. If user code removed its own rights to hide
    files, they are restored: read for listing, search for measuring and for going up again.
    """
    try:
        try:
            fd = os.open(name, removal.DIRECTORY, dir_fd=here)
        except PermissionError:
            os.chmod(name, 0o700, dir_fd=here)
            fd = os.open(name, removal.DIRECTORY, dir_fd=here)
    except OSError:
        return -1  # Removed, or not a directory any more.
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o500 != 0o500:
            os.fchmod(fd, mode | 0o500)
    except OSError:
        pass  # Of another owner; what can be read of it still counts.
    return fd


def _leave(here: int, inode: int) -> int:
    """Open the directory above; -1 if it does not have this inode number any more."""
    try:
        fd = os.open("..", removal.DIRECTORY, dir_fd=here)
    except OSError:
        return -1
    if os.fstat(fd).st_ino == inode:
        return fd
    os.close(fd)
    return -1


def _measure_directory(here: int, linked: set[int], limit: int) -> tuple[int, int, list[str]]:
    """Bytes, number of entries, and names of the directories in one directory."""
    total = seen = 0
    names: list[str] = []
    try:
        with os.scandir(here) as items:
            for item in items:
                seen += 1
                if seen > limit:
                    break
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    # It exists, and occupies at least this much.
                    total += BLOCK
                    if item.is_dir(follow_symlinks=False):
                        names.append(item.name)
                    continue
                if stat.S_ISDIR(status.st_mode):
                    names.append(item.name)
                elif status.st_nlink > 1:
                    if status.st_ino in linked:
                        continue
                    linked.add(status.st_ino)
                total += max(status.st_blocks * 512, BLOCK)
    except OSError:
        pass  # As far as it could be read.
    return total, seen, names
