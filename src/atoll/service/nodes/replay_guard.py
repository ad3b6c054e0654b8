"""
Ensures that a signed request is accepted once: remembers the nonces of accepted requests.

Nonces are kept in files of the node's directory, one per minute of the requests' own time. So all
processes of a node share them, and they survive a restart. Each file is bounded, and is removed
once requests of its minute have expired. All methods block: callers use a thread.
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
NONCE_SIZE = 22
"""Characters."""
MAX_PER_MINUTE = 200_000
"""Further requests are refused: a nonce that is forgotten could be used again."""


class ReplayGuard:
    def __init__(self, directory: Path, lifetime: int) -> None:
        """A request is valid for `lifetime` seconds before and after its time."""
        self._directory = directory
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._known: dict[int, set[bytes]] = {}
        """By minute, as far as its file has been read."""
        self._oldest = 0

    def claim(self, nonce: str, at: int, now: float) -> bool:
        """Record the nonce of a request made at `at`; false if it was recorded before."""
        name = nonce.encode()
        if len(name) != NONCE_SIZE:
            return False
        with self._lock:
            try:
                self._expire(now)
                return self._record(at // MINUTE, name)
            except OSError as error:
                raise TemporaryError(
                    f"Cannot record a forwarded request in {self._directory}: {error}.",
                    code="forward_not_recorded",
                ) from error

    def _record(self, minute: int, name: bytes) -> bool:
        known = self._known.setdefault(minute, set())
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._directory / str(minute), flags, 0o600)
        try:
            # Another process may have accepted the nonce since the file was last read.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A record that a full disk cut short is overwritten.
            start = len(known) * NONCE_SIZE
            new = os.pread(fd, MAX_PER_MINUTE * NONCE_SIZE - start, start)
            ends = range(NONCE_SIZE, len(new) + 1, NONCE_SIZE)
            known.update(new[end - NONCE_SIZE : end] for end in ends)
            if name in known:
                return False
            if len(known) >= MAX_PER_MINUTE:
                raise TemporaryError(
                    "Other nodes forwarded too many requests to this node within one minute.",
                    code="too_many_forwards",
                )
            if os.pwrite(fd, name, len(known) * NONCE_SIZE) != NONCE_SIZE:
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
