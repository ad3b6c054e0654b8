"""
Size and removal of directory trees that other processes write to.

Trees are walked by descriptor, one for each level, and on one file system: so a name that is
swapped for a link cannot lead elsewhere, and paths of any length work. Blocking file work; callers
use a thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
import math
from typing import TYPE_CHECKING

from atoll.executor.files import removal

MAX_DEPTH = 256
"""Directories in directories; each takes a descriptor while its own are counted."""
BLOCK = 4096
"""The bytes that each file or directory counts at least."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooDeep(Exception):
    """There are more levels of directories than are counted."""


def tree_size(top: Path) -> int:
    """
    Bytes on disk of everything below a directory. Files that are removed meanwhile may or may not
    count.
    """
    total = 0
    seen: set[int] = set()
    try:
        first = os.open(top, _DIRECTORY)
    except OSError:
        return 0
    opened = [(first, _names(first))]
    device = os.fstat(first).st_dev
    try:
        while opened:
            fd, names = opened[-1]
            if not names:
                os.close(opened.pop()[0])
                continue
            with contextlib.suppress(OSError):  # It was removed meanwhile.
                status = os.stat(name := names.pop(), dir_fd=fd, follow_symlinks=False)
                if status.st_dev != device:
                    continue
                directory = stat.S_ISDIR(status.st_mode)
                if status.st_nlink > 1 and not directory:
                    if status.st_ino in seen:
                        continue
                    seen.add(status.st_ino)
                total += max(BLOCK, status.st_blocks * 512)
                if directory:
                    if len(opened) >= MAX_DEPTH:
                        raise TooDeep
                    below = os.open(name, _DIRECTORY, dir_fd=fd)
                    opened.append((below, _names(below)))
        return total
    finally:
        for fd, _ in opened:
            os.close(fd)


def _names(fd: int) -> list[str]:
    try:
        return os.listdir(fd)
    except OSError:
        return []


def deleted_size(pid: int, top: Path) -> int:
    """
    Bytes of files on the same file system that have no name any more and that processes in the PID
    namespace of this one have open.
    """
    try:
        device, space = os.stat(top).st_dev, os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return 0
    found: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # It has exited, or belongs to another user.
            if not entry.isdecimal() or os.readlink(f"/proc/{entry}/ns/pid") != space:
                continue
            for number in os.listdir(f"/proc/{entry}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{entry}/fd/{number}")
                    regular = stat.S_ISREG(status.st_mode)
                    if regular and status.st_nlink == 0 and status.st_dev == device:
                        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def remove_tree(path: Path) -> None:
    """Remove a tree of any depth and permissions, as user code may leave it."""
    try:
        top = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        while True:
            try:
                removal.empty(top, math.inf)
                break
            except FileNotFoundError:
                continue  # Another process is removing it too.
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)
