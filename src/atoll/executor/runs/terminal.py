"""
Terminals of runs: a pair whose one end the supervisor reads and writes, the other is the run's.

What is imported is imported when a terminal is: most instances never have one.
"""

from __future__ import annotations

import os
import struct

END_OF_INPUT = b"\x04"
"""What a terminal takes for the end of its input, at the beginning of a line."""
_SIZE = struct.Struct("HHHH")
MAX_SIZE = 0xFFFF


def open(rows: int, columns: int) -> tuple[int, int]:
    """The supervisor's end and the run's."""
    ours, theirs = os.openpty()
    resize(ours, rows, columns)
    return ours, theirs


def resize(fd: int, rows: int, columns: int) -> None:
    """Those in the foreground are told by SIGWINCH."""
    import fcntl
    import termios

    size = _SIZE.pack(min(rows, MAX_SIZE), min(columns, MAX_SIZE), 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def foreground(fd: int) -> int:
    """The process group that signals from the keyboard go to; 0 when there is none."""
    try:
        return max(0, os.tcgetpgrp(fd))
    except OSError:
        return 0


def control(fd: int) -> None:
    """In the leader of a new session: this is its terminal from now on."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
