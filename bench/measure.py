"""Samples in milliseconds, and how they are shown."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Samples:
    name: str
    values: tuple[float, ...]
    """Milliseconds, sorted."""

    @property
    def p50(self) -> float:
        return statistics.median(self.values)

    @property
    def p95(self) -> float:
        return self.values[min(len(self.values) - 1, int(len(self.values) * 0.95))]

    @property
    def p99(self) -> float:
        return self.values[min(len(self.values) - 1, int(len(self.values) * 0.99))]

    def line(self) -> str:
        return (
            f"{self.name:<46} min {self.values[0]:9.3f}   p50 {self.p50:9.3f}   "
            f"p99 {self.p99:9.3f} ms   n {len(self.values)}"
        )


def samples(name: str, values: list[float]) -> Samples:
    return Samples(name, tuple(sorted(values)))


def timed(name: str, work: Callable[[], object], *, count: int, warm: int = 5) -> Samples:
    for _ in range(warm):
        work()
    values = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        values.append((time.perf_counter() - start) * 1000)
    return samples(name, values)
