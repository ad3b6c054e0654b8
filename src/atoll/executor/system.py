"""The few system calls that Python's `os` does not have."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: object) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl %d" % option)


def set_dumpable(dumpable: bool) -> None:
    """A process that is not dumpable cannot be traced, and its /proc files are closed to its peers."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_subreaper() -> None:
    """Orphaned descendants become children of this process, so none leaves its tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, name.encode()[:15])


def die_with_parent(signal: int) -> None:
    """The parent's end, whatever it dies of, sends this process `signal`."""
    _prctl(_PR_SET_PDEATHSIG, signal)
