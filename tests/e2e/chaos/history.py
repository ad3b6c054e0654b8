"""Responses to clients, and faults of servers and instances, in order."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.chaos.plan import Kind


@dataclass(frozen=True)
class ReceivedEvent:
    """An event that a reader received."""

    number: int | None
    name: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """A fault that came about."""

    kind: Kind
    session: int | None
    """Session whose instance was affected, or null."""
    instance_id: str | None
    began: int
    ended: int
    """Nanoseconds of the monotonic clock."""


@dataclass
class Received:
    """Everything that clients received about one job."""

    sent: int = 0
    """How often it may have reached a server."""
    accepted: set[str] = field(default_factory=set)
    """The ids that responses contained."""
    submitted_at: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    events: list[ReceivedEvent] = field(default_factory=list)
    read_to_end: bool = False
    cancel_sent: bool = False
    cancelled_at: int | None = None
    """When a response reported it as cancelled."""
    odd: list[str] = field(default_factory=list)
    """Answers that no client should get."""


class History:
    def __init__(self) -> None:
        self.start = time.monotonic_ns()
        self.jobs: dict[int, Received] = defaultdict(Received)
        self.faults: list[Done] = []
        self.odd: list[str] = []
        self._lines: list[tuple[int, int | None, str]] = []
        self._last: dict[int | None, str] = {}

    def note(self, text: str, job: int | None = None) -> None:
        """Add a line, unless it repeats the last one of the job."""
        if job is None or self._last.get(job) != text:
            self._lines.append((time.monotonic_ns(), job, text))
        self._last[job] = text

    def when(self, at: int) -> str:
        return f"{(at - self.start) / 1e9:8.3f}"

    def lines(self, job: int | None = None) -> list[tuple[int, str]]:
        """What was noted of a job, and of the faults."""
        return [
            (at, text if whose is None else f"job {whose}: {text}")
            for at, whose, text in self._lines
            if job is None or whose in (None, job)
        ]
