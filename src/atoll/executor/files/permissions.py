"""
Opening what user code has closed to itself, and so to us, who are the same user.

Rights that are taken to look at something are given back when it is closed. No link is followed,
and rights are changed through descriptors only: whatever has the name by then is left alone.
"""

from __future__ import annotations

import os
import stat

from .paths import READING, FileError, split, translate
from .removal import DIRECTORY, HELD, reopened


def open_file(top: int, path: str) -> int:
    """A regular file beneath a directory, for reading, whatever its rights."""
    *above, name = split(path)
    opened = [(os.dup(top), -1)]
    try:
        for part in above:
            opened.append(open_directory(part, opened[-1][0]))
        fd, mode = _open(name, READING, opened[-1][0])
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
    """What has this name in a directory, and the rights to give back; see `close`."""
    return _open(name, READING, fd)


def _open(name: str, flags: int, fd: int) -> tuple[int, int]:
    """
    Open for reading what is ours, whatever rights user code has left it; the rights that are to be
    given back when it is closed, -1 if none were taken.
    """
    try:
        return os.open(name, flags, dir_fd=fd), -1
    except PermissionError:
        return _take(name, flags, fd)


def open_directory(name: str, fd: int) -> tuple[int, int]:
    """The same of a directory, which is also to be entered."""
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


def _take(name: str, flags: int, fd: int) -> tuple[int, int]:
    """Make it readable for its owner, and open it; the rights that it had."""
    held = os.open(name, HELD, dir_fd=fd)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        return reopened(held, mode | 0o500, flags), mode
    finally:
        os.close(held)


def close(fd: int, mode: int) -> None:
    if mode >= 0:
        os.fchmod(fd, mode)
    os.close(fd)
