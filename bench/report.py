"""
Things that do the same work, timed side by side, and what they say of each other.

They take turns, so that what else the machine does falls on all of them. What makes ready is not
timed, and what was written before is on the disk by then.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.measure import Samples, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MEGABYTE = 1_000_000


def nothing() -> None: ...


@dataclass(frozen=True)
class Way:
    """One way to do the work; `ready` comes before each time and is not timed."""

    name: str
    work: Callable[[], object]
    ready: Callable[[], object] = nothing
    ours: bool = False


def take_turns(ways: Sequence[Way], rounds: int, *, sync: bool = True) -> list[Samples]:
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            way.ready()
            if sync:
                os.sync()
            start = time.perf_counter()
            way.work()
            taken[way.name].append((time.perf_counter() - start) * 1000)
    return [samples(name, values) for name, values in taken.items()]


@dataclass
class Report:
    """Prints as it goes, and keeps the same for `--json`."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    _section: str = ""

    def machine(self) -> dict[str, Any]:
        return {
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }

    def section(self, name: str) -> None:
        self._section = name
        print(f"\n{name}", flush=True)

    def skip(self, what: str, reason: str) -> None:
        self.skipped.append({"section": self._section, "name": what, "reason": reason})
        print(f"{what:<46} not measured: {reason}", flush=True)

    def turns(
        self, ways: Sequence[Way], rounds: int, *, size: int | None = None, sync: bool = True
    ) -> dict[str, Samples]:
        """Time them and show them; `size` is how many bytes each of them moves."""
        found = {each.name: each for each in take_turns(ways, rounds, sync=sync)}
        self.show(found, [way.name for way in ways if way.ours], size=size)
        return found

    def show(
        self, found: dict[str, Samples], ours: Sequence[str], *, size: int | None = None
    ) -> None:
        """Each of ours beside each of the others: above 1 it takes longer, and says so."""
        others = [each for name, each in found.items() if name not in ours]
        for name, each in found.items():
            rate = "" if size is None else f"   {size / MEGABYTE / each.p50 * 1000:8.1f} MB/s"
            print(each.line() + rate, flush=True)
            row: dict[str, Any] = {
                "section": self._section,
                "name": name,
                "ours": name in ours,
                "min_ms": each.values[0],
                "p50_ms": each.p50,
                "p99_ms": each.p99,
                "n": len(each.values),
                "bytes": size,
                "time_beside": {},
            }
            if name in ours:
                row["time_beside"] = {other.name: each.p50 / other.p50 for other in others}
                for other in others:
                    print(f"{'':<6}{_beside(each, other)}", flush=True)
            self.rows.append(row)

    def write(self, path: Path) -> None:
        content = {"machine": self.machine(), "rows": self.rows, "skipped": self.skipped}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _beside(ours: Samples, other: Samples) -> str:
    p50, p99 = ours.p50 / other.p50, ours.p99 / other.p99
    word = "slower" if p50 > 1.05 else "faster" if p50 < 0.95 else "the same"
    return f"{p50:8.2f} x the time of {other.name} (p99 {p99:.2f} x): {word}"
