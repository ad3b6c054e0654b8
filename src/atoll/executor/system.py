"""The few system calls that Python's `os` does not have."""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

# Found once, and called with the interpreter's lock held: a child that calls it touches few pages.
_call = ctypes.PyDLL(None).prctl


def _prctl(option: int, value: object) -> None:
    if _call(option, value, 0, 0, 0) != 0:
        raise OSError("prctl %d failed" % option)


def set_dumpable(dumpable: bool) -> None:
    """
    A process that is not dumpable cannot be traced, and its /proc files are closed to its peers.
    """
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_subreaper() -> None:
    """Orphaned descendants become children of this process, so none leaves its tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, name.encode()[:15])


def die_with_parent(signal: int) -> None:
    """The parent's end, whatever it dies of, sends this process `signal`."""
    _prctl(_PR_SET_PDEATHSIG, signal)
