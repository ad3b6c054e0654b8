"""The few system calls that Python's `os` does not have."""

from __future__ import annotations

import _ctypes

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

# The function behind `ctypes`, found once: the package would take more memory than all of ours, and
# a child that calls through it touches more pages.
_prctl_address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]


def _prctl(option: int, value: object) -> None:
    if _ctypes.call_function(_prctl_address, (option, value, 0, 0, 0)) != 0:
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
