"""
Counts what is taken from the warm pools and measures what it takes to fill them, by template.

Only the newest creates and starts are stored, so a template costs a few kilobytes however much it
is used. Nothing here awaits: a create that takes a ready instance pays for one append.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.clock import Clock

MAX_CREATES = 1024
"""Creates that are stored; if the window has more, the rate is that of the newest."""
MAX_STARTS = 20
"""Starts that are stored."""
START_SECONDS = 1.0
"""Assumed duration of a start until one was measured."""
BURST_SECONDS = 1.0
"""Creates within this time, or within the duration of a start if that is longer, are one burst."""


@dataclass(slots=True)
class _Samples:
    creates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_CREATES))
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STARTS))
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STARTS))
    hits: int = 0
    misses: int = 0


class PoolStats:
    def __init__(self, clock: Clock, window: timedelta) -> None:
        self._clock = clock
        self._window = window.total_seconds()
        self._samples: dict[str, _Samples] = {}

    def keep(self, template_ids: set[str]) -> None:
        """Drop the samples of all other templates."""
        self._samples = {key: self._samples.get(key) or _Samples() for key in template_ids}

    def record_take(self, template_id: str, *, hit: bool) -> None:
        """A create needed an instance, and the pool had one or not."""
        samples = self._samples.get(template_id)
        if samples is not None:
            samples.creates.append(self._clock.monotonic())
            samples.hits += hit
            samples.misses += not hit

    def record_start(self, template_id: str, seconds: float | None, memory: int | None) -> None:
        """An instance was started; `seconds` is null unless it was for the pool."""
        samples = self._samples.get(template_id)
        if samples is not None and seconds is not None:
            samples.starts.append(seconds)
        if samples is not None and memory is not None:
            samples.memory.append(memory)

    def counts(self, template_id: str) -> tuple[int, int]:
        """Hits and misses."""
        samples = self._samples.get(template_id) or _Samples()
        return samples.hits, samples.misses

    def rate(self, template_id: str) -> float:
        """Creates per second, over the window."""
        creates = self._recent(template_id)
        if not creates:
            return 0.0
        span = self._window
        if len(creates) == MAX_CREATES:
            span = min(span, max(self._clock.monotonic() - creates[0], 1e-3))
        return len(creates) / span

    def burst(self, template_id: str) -> int:
        """Size of the largest burst in the window."""
        span = max(BURST_SECONDS, self.start_seconds(template_id) or START_SECONDS)
        burst: deque[float] = deque()
        largest = 0
        for created_at in self._recent(template_id):
            burst.append(created_at)
            while burst[0] <= created_at - span:
                burst.popleft()
            largest = max(largest, len(burst))
        return largest

    def start_seconds(self, template_id: str) -> float | None:
        """Median duration of the last starts."""
        samples = self._samples.get(template_id)
        return statistics.median(samples.starts) if samples and samples.starts else None

    def memory(self, template_id: str) -> int | None:
        """Median bytes that a ready instance uses; null where the node cannot measure it."""
        samples = self._samples.get(template_id)
        return int(statistics.median(samples.memory)) if samples and samples.memory else None

    def _recent(self, template_id: str) -> deque[float]:
        samples = self._samples.get(template_id)
        if samples is None:
            return deque()
        since = self._clock.monotonic() - self._window
        while samples.creates and samples.creates[0] <= since:
            samples.creates.popleft()
        return samples.creates
