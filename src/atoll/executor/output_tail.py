"""The last bytes that came through a pipe. Reads at once, so that the writer never blocks."""

from __future__ import annotations

import os

from .event_loop import READ, Loop

MAX_KEPT = 1000
CHUNK = 65_536


class OutputTail:
    def __init__(self, loop: Loop, fd: int) -> None:
        self.last = b""
        self._loop = loop
        self._fd = fd
        os.set_blocking(fd, False)
        loop.add(fd, READ, lambda mask: self._read())

    def _read(self) -> None:
        """Read one chunk only: a writer that never stops must not keep the loop busy."""
        try:
            chunk = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self.last = (self.last + chunk)[-MAX_KEPT:]
        else:
            self._close()

    def close(self) -> None:
        """Read the remaining output and close the pipe; `last` stays available."""
        if self._fd >= 0:
            self._read()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1
