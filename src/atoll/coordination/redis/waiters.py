"""The tasks of this replica that wait for something in Redis, by the tokens that wake them."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.coordination.wakeup import WakeUp
from atoll.errors import CoordinationUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiters:
    def __init__(self) -> None:
        self._wake_ups: dict[str, WakeUp] = {}
        self.shut_down = False
        """Whether this replica is shutting down."""

    @contextmanager
    def add(self) -> Iterator[tuple[str, WakeUp]]:
        """A new token, and what waking that token wakes."""
        token, wake_up = secrets.token_hex(8), WakeUp()
        self._wake_ups[token] = wake_up
        try:
            yield token, wake_up
        finally:
            del self._wake_ups[token]

    def wake(self, token: str) -> None:
        if token in self._wake_ups:
            self._wake_ups[token].wake()

    def wake_all(self) -> None:
        for wake_up in self._wake_ups.values():
            wake_up.wake()

    def check(self) -> None:
        if self.shut_down:
            raise CoordinationUnavailable("This replica is shutting down. Retry the request.")
