"""Those of this replica who wait for something in Redis, by the tokens that wake them."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.coordination.bell import Bell
from atoll.errors import CoordinationUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiting:
    def __init__(self) -> None:
        self._bells: dict[str, Bell] = {}
        self.ended = False
        """Whether this replica shuts down."""

    @contextmanager
    def bell(self) -> Iterator[tuple[str, Bell]]:
        """A new token and what it rings."""
        token, bell = secrets.token_hex(8), Bell()
        self._bells[token] = bell
        try:
            yield token, bell
        finally:
            del self._bells[token]

    def ring(self, token: str) -> None:
        if token in self._bells:
            self._bells[token].ring()

    def ring_all(self) -> None:
        for bell in self._bells.values():
            bell.ring()

    def check(self) -> None:
        if self.ended:
            raise CoordinationUnavailable(
                "This replica is shutting down; send the request again.",
            )
