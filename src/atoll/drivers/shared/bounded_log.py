"""A log in memory, of limited size, for programs whose output untrusted code can cause."""

from __future__ import annotations

import fcntl
import os

LOG_SIZE = 16 * 1024
LOG_TAIL = 1000
"""Bytes of a log that an error quotes."""


def create_log() -> int:
    """
    A descriptor for the output of a program that others can make write: it takes `LOG_SIZE` bytes
    and refuses more. It is memory of the kernel, so no file of the host grows by it.
    """
    fd = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, LOG_SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_log_tail(fd: int) -> str:
    """The end of what was written to such a descriptor."""
    written = os.pread(fd, LOG_SIZE, 0).rstrip(b"\0")
    return written[-LOG_TAIL:].decode(errors="replace").strip()
