"""
What a benchmark has measured: printed as it goes, and written as JSON at the end, also if it fails.

All benchmarks write one schema:

    benchmark   name of the module
    date        when it ended, UTC
    commit      that was measured; `changed` says whether the checkout had other changes
    machine     cores, load before the run, memory, kernel, Python
    figures     a list. Each has section, name and unit; median, p99, min and the count n of its
                samples (p99 and min are null for a single value); `ours` says whether it is Atoll;
                `ratios` maps the name of another figure of the section to this one's median and p99
                divided by its; `goal` is null, or has name, bound, at_least and met
    missing     what could not be measured: section, name and reason
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bench.measure import Samples, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.goals import Goal

HERE = Path(__file__).parent
RESULTS = HERE / "results"
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
    """
    Time things that do the same work side by side, so that what else the machine does falls on all
    of them. With `sync`, what was written before is on the disk by then.
    """
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


def parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bench" if benchmark == "main" else f"bench.{benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--json", type=Path, default=RESULTS / f"{benchmark}.json",
        help="file for the results; by default %(default)s",
    )  # fmt: skip
    return made


class Report:
    def __init__(self, benchmark: str, path: Path, checkout: Path = HERE) -> None:
        self._path = path
        self._section = ""
        self._figures: list[dict[str, Any]] = []
        self._missing: list[dict[str, str]] = []
        self._about = {"benchmark": benchmark, **_commit(checkout), "machine": _machine()}

    def __enter__(self) -> Self:
        machine = self._about["machine"]
        print(
            f"{machine['cores']} cores, load {machine['load']}, {machine['memory'] >> 30} GiB of "
            f"memory, Linux {machine['kernel']}, Python {machine['python']}",
            flush=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        if goals := [figure for figure in self._figures if figure["goal"] is not None]:
            print("\ngoals")
            for figure in goals:
                print(_verdict(figure))
        content = {
            **self._about,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "figures": self._figures,
            "missing": self._missing,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nresults: {self._path}")

    def section(self, name: str) -> None:
        self._section = name
        print(f"\n{name}", flush=True)

    def skip(self, what: str, reason: str) -> None:
        self._missing.append({"section": self._section, "name": what, "reason": reason})
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
        """Show each of ours beside each of the others: above 1 it takes longer, and says so."""
        others = [each for name, each in found.items() if name not in ours]
        for name, each in found.items():
            self.add(each, *(others if name in ours else ()), ours=name in ours, size=size)

    def add(
        self, measured: Samples, *others: Samples, ours: bool = True, size: int | None = None
    ) -> Samples:
        """Show one, beside others that have been shown."""
        rate = "" if size is None else f"   {size / MEGABYTE / measured.p50 * 1000:8.1f} MB/s"
        print(measured.line() + rate, flush=True)
        for other in others:
            print(f"{'':<6}{_beside(measured, other)}", flush=True)
        self.record(
            measured.name, "ms", measured.p50,
            p99=measured.p99, min=measured.values[0], n=len(measured.values), ours=ours,
            ratios={
                other.name: {"median": measured.p50 / other.p50, "p99": measured.p99 / other.p99}
                for other in others
            },
        )  # fmt: skip
        return measured

    def value(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        beside: Mapping[str, float] | None = None,
        ours: bool = True,
    ) -> float:
        """Show a single value, beside values of others."""
        print(f"{name:<58} {value:12,.2f} {unit}", flush=True)
        ratios = {other: value / its for other, its in (beside or {}).items() if its}
        for other, ratio in ratios.items():
            print(f"{'':<6}{ratio:8.2f} x {other}", flush=True)
        self.record(
            name, unit, value, ours=ours,
            ratios={other: {"median": ratio, "p99": None} for other, ratio in ratios.items()},
        )  # fmt: skip
        return value

    def goal(self, goal: Goal, value: float) -> None:
        """Record a figure that something is asked of; all are shown at the end."""
        about = {"name": goal.name, "bound": goal.bound, "at_least": goal.at_least}
        self.record(goal.name, goal.unit, value, goal={**about, "met": goal.met(value)})

    def record(self, name: str, unit: str, median: float, **more: Any) -> None:
        """Without showing it."""
        figure = {"section": self._section, "name": name, "unit": unit, "median": median}
        figure |= {"p99": None, "min": None, "n": 1, "ours": True, "ratios": {}, "goal": None}
        self._figures.append(_rounded(figure | more))


def _rounded(value: Any) -> Any:
    """To five significant digits: the rest is noise."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _commit(checkout: Path) -> dict[str, Any]:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=checkout, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "--short=8", "HEAD"), "changed": bool(changes)}


def _beside(ours: Samples, other: Samples) -> str:
    p50, p99 = ours.p50 / other.p50, ours.p99 / other.p99
    word = "slower" if p50 > 1.05 else "faster" if p50 < 0.95 else "the same"
    return f"{p50:8.2f} x the time of {other.name} (p99 {p99:.2f} x): {word}"


def _verdict(figure: dict[str, Any]) -> str:
    goal = figure["goal"]
    sign = ">=" if goal["at_least"] else "<="
    verdict = "reached" if goal["met"] else "MISSED"
    return (
        f"{figure['name']:<64} {figure['median']:9.2f} {figure['unit']:<3} "
        f"{sign} {goal['bound']:<6g} {verdict}"
    )
