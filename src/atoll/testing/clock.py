"""A clock that tests control."""

from __future__ import annotations

from datetime import UTC, datetime


class ManualClock:
    """Advances only when the test changes `time`, in seconds."""

    def __init__(self, time: float = 1000.0) -> None:
        self.time = time

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time, UTC)

    def monotonic(self) -> float:
        return self.time
