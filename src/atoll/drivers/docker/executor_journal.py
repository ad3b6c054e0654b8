"""
Protects the journal of an executor from the code that it runs.

The executor opens the files as the user that user code has too. Linux lets nobody reopen what a
process has open that is not dumpable; gVisor does, by the process's descriptors in /proc, as far as
the file's own rights allow it. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def protect(journal: Path) -> None:
    """Give the files of an open journal to root: descriptors stay valid, and no new one is made."""
    directory = os.open(journal, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(directory):
            _take(name, directory)
    finally:
        os.close(directory)


def _take(name: str, directory: int) -> None:
    try:
        file = os.open(name, _FLAGS, dir_fd=directory)
    except OSError as error:
        # A link or a socket that a module of the template left there: not the journal.
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        return
    try:
        os.fchown(file, 0, 0)
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
