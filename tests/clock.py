"""A clock that the test moves."""

from __future__ import annotations

from datetime import UTC, datetime


class MovedClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time, UTC)

    def monotonic(self) -> float:
        return self.time
