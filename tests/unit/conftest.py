"""
Unit tests are pure: they start no process, open no socket and no database. A test that does belongs
in `tests/component`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

IMPURE = frozenset({
    "subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "socket.bind",
    "socket.connect", "sqlite3.connect",
})  # fmt: skip
"""Audit events of Python."""


class _Guard:
    active = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.active and event in IMPURE:
            raise AssertionError(f"A unit test caused {event}{arguments!r}: move it to component.")


_guard = _Guard()
sys.addaudithook(_guard)


@pytest.fixture(autouse=True)
def pure() -> Iterator[None]:
    _guard.active = True
    yield
    _guard.active = False
