"""
The clock, which tests replace.

`now` is aware UTC and may jump with the machine's clock, so it is for records. `monotonic` never
goes back and measures durations and deadlines inside one process.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime: ...
    def monotonic(self) -> float: ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
