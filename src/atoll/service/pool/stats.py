"""
What is asked of the warm pools, and what it takes to fill them, by template.

Only the newest creates and starts are remembered, so a template costs a few kilobytes however much
it is used. Nothing here awaits: a create that takes a ready instance pays an append.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.clock import Clock

CREATES = 1024
"""Creates that are remembered; with more in the window the rate is that of the newest."""
STARTS = 20
"""Starts that are remembered."""
START_SECONDS = 1.0
"""What a start is taken to need before one was measured."""
AT_ONCE = 1.0
"""Seconds within which creates count as one burst, or what a start takes if that is longer."""


@dataclass(slots=True)
class _Seen:
    creates: deque[float] = field(default_factory=lambda: deque(maxlen=CREATES))
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS))
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=STARTS))
    hits: int = 0
    misses: int = 0


class PoolStats:
    def __init__(self, clock: Clock, window: timedelta) -> None:
        self._clock = clock
        self._window = window.total_seconds()
        self._seen: dict[str, _Seen] = {}

    def keep(self, template_ids: set[str]) -> None:
        """Remember these templates, and no others."""
        self._seen = {key: self._seen.get(key) or _Seen() for key in template_ids}

    def taken(self, template_id: str, *, hit: bool) -> None:
        """Somebody came for an instance, and there was one or not."""
        seen = self._seen.get(template_id)
        if seen is not None:
            seen.creates.append(self._clock.monotonic())
            seen.hits += hit
            seen.misses += not hit

    def started(self, template_id: str, seconds: float | None, memory: int | None) -> None:
        """One was made, in that time if it was for the pool, and uses so many bytes."""
        seen = self._seen.get(template_id)
        if seen is not None and seconds is not None:
            seen.starts.append(seconds)
        if seen is not None and memory is not None:
            seen.memory.append(memory)

    def counts(self, template_id: str) -> tuple[int, int]:
        """How many found a ready instance, and how many did not."""
        seen = self._seen.get(template_id) or _Seen()
        return seen.hits, seen.misses

    def rate(self, template_id: str) -> float:
        """Creates a second, over the window."""
        creates = self._recent(template_id)
        if not creates:
            return 0.0
        span = self._window
        if len(creates) == CREATES:
            span = min(span, max(self._clock.monotonic() - creates[0], 1e-3))
        return len(creates) / span

    def burst(self, template_id: str) -> int:
        """The most creates in the window that came at once."""
        span = max(AT_ONCE, self.start_seconds(template_id) or START_SECONDS)
        at_once: deque[float] = deque()
        most = 0
        for moment in self._recent(template_id):
            at_once.append(moment)
            while at_once[0] <= moment - span:
                at_once.popleft()
            most = max(most, len(at_once))
        return most

    def start_seconds(self, template_id: str) -> float | None:
        """What a start takes: the median of the last ones."""
        seen = self._seen.get(template_id)
        return statistics.median(seen.starts) if seen is not None and seen.starts else None

    def memory(self, template_id: str) -> int | None:
        """What an instance uses that waits, in bytes; none where the node cannot tell."""
        seen = self._seen.get(template_id)
        return int(statistics.median(seen.memory)) if seen is not None and seen.memory else None

    def _recent(self, template_id: str) -> deque[float]:
        seen = self._seen.get(template_id)
        if seen is None:
            return deque()
        since = self._clock.monotonic() - self._window
        while seen.creates and seen.creates[0] <= since:
            seen.creates.popleft()
        return seen.creates
