"""
Nonces of signed requests that were accepted, so that none is accepted twice.

They are in files of the node's directory, one for each minute of the requests' own time: all
processes of a node see them, and a process that was started again still does. A file is bounded and
is removed when no request of its minute would be accepted any more. Blocking; callers use a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from typing import TYPE_CHECKING

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from pathlib import Path

MINUTE = 60
SIZE = 22
"""Characters of a nonce."""
MAX_PER_MINUTE = 200_000
"""Beyond it requests are refused: forgetting one would let it be repeated."""


class ReplayGuard:
    def __init__(self, directory: Path, lifetime: int) -> None:
        """A request is accepted for `lifetime` seconds before and after its time."""
        self._directory = directory
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._known: dict[int, set[bytes]] = {}
        """By minute, as far as its file was read."""
        self._oldest = 0

    def claim(self, nonce: str, at: int, now: float) -> bool:
        """Whether a nonce of a request made at `at` is new; it is not from then on."""
        name = nonce.encode()
        if len(name) != SIZE:
            return False
        with self._lock:
            try:
                self._expire(now)
                return self._record(at // MINUTE, name)
            except OSError as error:
                raise TemporaryError(
                    f"A forwarded request cannot be recorded in {self._directory}: {error}.",
                    code="forward_not_recorded",
                ) from error

    def _record(self, minute: int, name: bytes) -> bool:
        known = self._known.setdefault(minute, set())
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._directory / str(minute), flags, 0o600)
        try:
            # Of one process at a time: another one may have accepted it since this one looked.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # One that was cut short, by a full disk, is written over.
            start = len(known) * SIZE
            new = os.pread(fd, MAX_PER_MINUTE * SIZE - start, start)
            known.update(new[at : at + SIZE] for at in range(0, len(new) - SIZE + 1, SIZE))
            if name in known:
                return False
            if len(known) >= MAX_PER_MINUTE:
                raise TemporaryError(
                    "This node was sent too many requests by other nodes in one minute.",
                    code="too_many_forwards",
                )
            if os.pwrite(fd, name, len(known) * SIZE) != SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            known.add(name)
            return True
        finally:
            os.close(fd)

    def _expire(self, now: float) -> None:
        oldest = int(now - self._lifetime) // MINUTE
        if oldest <= self._oldest or not self._directory.is_dir():
            return
        self._oldest = oldest
        self._known = {minute: known for minute, known in self._known.items() if minute >= oldest}
        for name in os.listdir(self._directory):
            if int(name) < oldest:
                (self._directory / name).unlink(missing_ok=True)
