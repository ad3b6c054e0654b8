"""The last bytes that came through a pipe, read as they come so that its writer never waits."""

from __future__ import annotations

import os

from .event_loop import READ, Loop

KEPT = 1000
"""Bytes."""
CHUNK = 65_536


class Tail:
    def __init__(self, loop: Loop, fd: int) -> None:
        self.last = b""
        self._loop = loop
        self._fd = fd
        os.set_blocking(fd, False)
        loop.add(fd, READ, lambda mask: self._read())

    def _read(self) -> None:
        """One piece at a time: a writer that never stops does not keep the loop busy."""
        try:
            piece = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        if piece:
            self.last = (self.last + piece)[-KEPT:]
        else:
            self._give_back()

    def close(self) -> None:
        """Take what is there and close the pipe; `last` stays."""
        if self._fd >= 0:
            self._read()
        self._give_back()

    def _give_back(self) -> None:
        if self._fd >= 0:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1
