"""
Protects the journal of an executor from the code that it runs.

The executor opens the journal's files as the user that user code has too. Linux does not let a
process reopen a file that a non-dumpable process has open; gVisor does, through /proc/PID/fd, as
far as the permissions of the file allow it. Blocking file system work; callers use a thread.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def protect(journal: Path) -> None:
    """
    Give the files of an open journal to root. The executor's file descriptors stay valid, and no
    other process can open the files.
    """
    directory = os.open(journal, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(directory):
            _protect_file(name, directory)
    finally:
        os.close(directory)


def _protect_file(name: str, directory: int) -> None:
    try:
        file = os.open(name, _FLAGS, dir_fd=directory)
    except OSError as error:
        # A symbolic link or a socket is not part of the journal: a module of the template made it.
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        return
    try:
        os.fchown(file, 0, 0)
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
