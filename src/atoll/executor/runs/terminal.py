"""
Terminals of runs: pseudo-terminal pairs, one end for the supervisor and one for the run.

Modules are imported only when needed: most instances never have a terminal.
"""

from __future__ import annotations

import os
import struct

END_OF_INPUT = b"\x04"
"""Ends a terminal's input, at the beginning of a line."""
_SIZE = struct.Struct("HHHH")
MAX_SIZE = 0xFFFF


def open(rows: int, columns: int) -> tuple[int, int]:
    """The supervisor's end and the run's."""
    ours, theirs = os.openpty()
    resize(ours, rows, columns)
    return ours, theirs


def resize(fd: int, rows: int, columns: int) -> None:
    """The foreground process group receives SIGWINCH."""
    import fcntl
    import termios

    size = _SIZE.pack(min(rows, MAX_SIZE), min(columns, MAX_SIZE), 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def foreground(fd: int) -> int:
    """The foreground process group; 0 if there is none."""
    try:
        return max(0, os.tcgetpgrp(fd))
    except OSError:
        return 0


def control(fd: int) -> None:
    """Make it the controlling terminal; to be called in the leader of a new session."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
