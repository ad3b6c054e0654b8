"""
Removing everything in a directory, whatever its depth and whatever rights the owner took away.

In steps, so that who has other things to do can do them in between. Rights are changed through
descriptors: as root nothing outside is touched, also while other processes swap names for links.
"""

from __future__ import annotations

import errno
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_RDONLY
HELD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens anything, whatever its rights, without following a link."""
TRASH = ".atoll-trash-"


def reopened(held: int, mode: int, flags: int) -> int:
    """What a `HELD` descriptor leads to, opened with these flags after its rights are `mode`."""
    kind = os.fstat(held).st_mode
    if stat.S_ISLNK(kind):
        raise OSError(errno.ELOOP, "")
    if flags & os.O_DIRECTORY and not stat.S_ISDIR(kind):
        raise OSError(errno.ENOTDIR, "")
    # By its descriptor and not by its name, which may be another file's or a link's by now.
    path = "/proc/self/fd/%d" % held
    os.chmod(path, mode)
    return os.open(path, flags & ~os.O_NOFOLLOW)


def open_directory(name: str, fd: int) -> int:
    """A directory of which all rights are taken for its owner."""
    held = os.open(name, HELD, dir_fd=fd)
    try:
        return reopened(held, 0o700, DIRECTORY)
    finally:
        os.close(held)


def move_to(trash: int, number: str, fd: int, name: str) -> None:
    """A directory is moved only by who may write to it, whatever the rights above it."""
    os.close(open_directory(name, fd))
    os.rename(name, number, src_dir_fd=fd, dst_dir_fd=trash)


def removing(top: int, name: str) -> Iterator[None]:
    """The steps of removing a directory with everything in it; the caller sees to the time."""
    here = open_directory(name, top)
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
            here = open_directory(name, top)
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
