"""
Removes directory trees of any depth, even if their owner took away the rights to enter them.

Works in steps, so that the caller can do other work in between. Modes are changed through
descriptors, so nothing outside is changed while other processes swap names for links.
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
PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens anything, whatever its rights, without following a link."""
TRASH = ".atoll-trash-"


def reopened(held: int, mode: int, flags: int) -> int:
    """Set the mode of what a `PATH_ONLY` descriptor refers to, and open it with these flags."""
    kind = os.fstat(held).st_mode
    if stat.S_ISLNK(kind):
        raise OSError(errno.ELOOP, "")
    if flags & os.O_DIRECTORY and not stat.S_ISDIR(kind):
        raise OSError(errno.ENOTDIR, "")
    # By descriptor and not by name, which may be another file's by now.
    path = "/proc/self/fd/%d" % held
    os.chmod(path, mode)
    return os.open(path, flags & ~os.O_NOFOLLOW)


def open_directory(name: str, fd: int) -> int:
    """Open a directory after giving its owner all rights."""
    held = os.open(name, PATH_ONLY, dir_fd=fd)
    try:
        return reopened(held, 0o700, DIRECTORY)
    finally:
        os.close(held)


def move_to(trash: int, number: str, fd: int, name: str) -> None:
    """Move a directory, which needs the right to write to it."""
    os.close(open_directory(name, fd))
    os.rename(name, number, src_dir_fd=fd, dst_dir_fd=trash)


def removing(top: int, name: str) -> Iterator[None]:
    """The steps of removing a directory with its content. The caller watches the time."""
    here = open_directory(name, top)
    try:
        yield from emptying(here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)


def empty(top: int, deadline: float) -> None:
    """Remove everything in a directory."""
    for _ in emptying(top):
        check_time(deadline)


def emptying(top: int) -> Iterator[None]:
    """
    The steps of removing everything in a directory.

    Each directory is moved to the top and emptied there, so neither the stack nor the number of
    descriptors depends on the depth.
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


def check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OSError(errno.ENOTEMPTY, "")


def _names(fd: int) -> Iterator[str]:
    """Names in a directory that is being emptied; reads again until there are none."""
    while True:
        with os.scandir(fd) as items:
            batch = [item.name for _, item in zip(range(1000), items)]
        if not batch:
            return
        yield from batch
