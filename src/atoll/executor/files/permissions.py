"""
Opens files and directories from which user code has removed its own rights.

The executor runs as the same user, so it restores the rights for the time that it needs them. No
link is followed, and modes are changed through descriptors only.
"""

from __future__ import annotations

import os
import stat

from .paths import READ_FLAGS, FileError, split, translate
from .removal import DIRECTORY, PATH_ONLY, reopened


def open_file(top: int, path: str) -> int:
    """Open a regular file beneath a directory for reading, whatever its mode."""
    *above, name = split(path)
    opened = [(os.dup(top), -1)]
    try:
        for part in above:
            opened.append(open_directory(part, opened[-1][0]))
        fd, mode = _open(name, READ_FLAGS, opened[-1][0])
        if mode >= 0:
            os.fchmod(fd, mode)
    except OSError as error:
        raise translate(error, path) from None
    finally:
        for each in reversed(opened):
            close(*each)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileError("not_a_file", "%s is not a regular file" % path)
    return fd


def open_for_reading(name: str, fd: int) -> tuple[int, int]:
    """Open a file in a directory; also returns the mode to restore, see `close`."""
    return _open(name, READ_FLAGS, fd)


def _open(name: str, flags: int, fd: int) -> tuple[int, int]:
    """
    Open for reading, whatever the mode. Also returns the mode to restore when it is closed, or -1
    if it was not changed.
    """
    try:
        return os.open(name, flags, dir_fd=fd), -1
    except PermissionError:
        return _open_forced(name, flags, fd)


def open_directory(name: str, fd: int) -> tuple[int, int]:
    """Open a directory that can also be entered; see `_open`."""
    opened, mode = _open(name, DIRECTORY, fd)
    if mode >= 0:
        return opened, mode
    try:
        had = stat.S_IMODE(os.fstat(opened).st_mode)
        if had & 0o500 != 0o500:
            os.fchmod(opened, had | 0o500)
            return opened, had
    except BaseException:
        os.close(opened)
        raise
    return opened, -1


def _open_forced(name: str, flags: int, fd: int) -> tuple[int, int]:
    """Make it readable for its owner and open it; also returns its former mode."""
    held = os.open(name, PATH_ONLY, dir_fd=fd)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        return reopened(held, mode | 0o500, flags), mode
    finally:
        os.close(held)


def close(fd: int, mode: int) -> None:
    if mode >= 0:
        os.fchmod(fd, mode)
    os.close(fd)
