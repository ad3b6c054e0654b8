"""
Removing everything in a directory, whatever its depth and whatever rights the owner took away.

In steps, so that who has other things to do can do them in between.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_RDONLY
TRASH = ".atoll-trash-"


def move_to(trash: int, number: str, fd: int, name: str) -> None:
    """A directory is moved only by who may write to it, whatever the rights above it."""
    os.chmod(name, 0o700, dir_fd=fd)
    os.rename(name, number, src_dir_fd=fd, dst_dir_fd=trash)


def removing(top: int, name: str) -> Iterator[None]:
    """The steps of removing a directory with everything in it; the caller sees to the time."""
    os.chmod(name, 0o700, dir_fd=top)
    here = os.open(name, DIRECTORY, dir_fd=top)
    try:
        yield from emptying(here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)


def empty(top: int, deadline: float) -> None:
    """Remove everything in a directory."""
    for _ in emptying(top):
        in_time(deadline)


def emptying(top: int) -> Iterator[None]:
    """
    The steps of it, whatever the depth and whatever rights the owner took away.

    Each directory is moved to the top and emptied there: no stack and no descriptor goes by depth.
    """
    count = 0
    for first in _names(top):
        yield
        try:
            os.unlink(first, dir_fd=top)
            continue
        except (IsADirectoryError, PermissionError):
            waiting = [first]
        while waiting:
            yield
            name = waiting.pop()
            os.chmod(name, 0o700, dir_fd=top)
            here = os.open(name, DIRECTORY, dir_fd=top)
            try:
                for item in _names(here):
                    yield
                    try:
                        os.unlink(item, dir_fd=here)
                    except (IsADirectoryError, PermissionError):
                        count += 1
                        moved = ".%s%d-%d" % (TRASH, os.getpid(), count)
                        move_to(top, moved, here, item)
                        waiting.append(moved)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)


def in_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OSError(errno.ENOTEMPTY, "")


def _names(fd: int) -> Iterator[str]:
    """The names in a directory while it is being emptied: read again until there are none."""
    while True:
        with os.scandir(fd) as items:
            batch = [item.name for _, item in zip(range(1000), items)]
        if not batch:
            return
        yield from batch
