"""
`make bench-embedded`: start-up, use and exit of a program that embeds Atoll, and of `atoll run`.

Each round is a new process, timed step by step from the start of its interpreter to its exit. With
`--beside` the rounds alternate between this checkout and another one. The exit includes Python's
own, which visits every imported object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import goals
from bench.measure import samples, timed
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HERE = Path(__file__).parent.parent
STEPS = """
import json, time
times = {"start": time.monotonic()}
def done(step): times[step] = time.monotonic()
"""
SYNC = """
from atoll import Atoll
atoll = Atoll(); done("import")
atoll.open(); done("open")
session = atoll.sessions.create(); done("first session")
assert session.run("print(1)").stdout == "1\\n"; done("first result")
session.delete(); done("delete the session")
atoll.close(); done("close")
"""
ASYNC = """
import asyncio
from atoll import AsyncAtoll
async def main():
    atoll = AsyncAtoll(); done("import")
    await atoll.open(); done("open")
    session = await atoll.sessions.create(); done("first session")
    assert (await session.run("print(1)")).stdout == "1\\n"; done("first result")
    await session.delete(); done("delete the session")
    await atoll.close(); done("close")
asyncio.run(main())
"""
FILLING = """
from atoll import Atoll
atoll = Atoll(); done("import")
atoll.open(); done("open")
while any(pool.ready < pool.target for pool in atoll.pools.list()): time.sleep(0.01)
done("fill the pool")
session = atoll.sessions.create(); done("session from the pool")
session.delete(); done("delete the session")
atoll.close(); done("close")
"""
ALL = "from start to exit"
RESPONSE = "from start to the first response"


@dataclass(frozen=True)
class Checkout:
    name: str
    path: Path

    def run(self, data_dir: Path, *arguments: str) -> tuple[float, str, float]:
        """Start time, output and end time of the process."""
        paths = {"PYTHONPATH": str(self.path / "src"), "ATOLL_DATA_DIR": str(data_dir)}
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | paths,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return started, done.stdout, time.monotonic()


def library(checkout: Checkout, data_dir: Path, *, program: str) -> dict[str, float]:
    """Milliseconds of each step."""
    code = f"{STEPS}{program}print(json.dumps(times))"
    started, printed, ended = checkout.run(data_dir, "-c", code)
    found, before = {}, started
    for step, at in {**json.loads(printed), "exit": ended}.items():
        found[step] = (at - before) * 1000
        before = at
    return {**found, ALL: (ended - started) * 1000}


def command_line(checkout: Checkout, data_dir: Path) -> dict[str, float]:
    """Milliseconds of `atoll run`. Its code prints the time at which it runs."""
    code = "import time; print(time.monotonic())"
    atoll = "from atoll.cli import main; main()"
    started, printed, ended = checkout.run(data_dir, "-c", atoll, "run", "-c", code)
    ran = float(printed)
    return {
        "from start to the code": (ran - started) * 1000,
        "from the code to exit": (ended - ran) * 1000,
        ALL: (ended - started) * 1000,
    }


def server(checkout: Checkout, data_dir: Path) -> dict[str, float]:
    """Milliseconds of `atoll serve` to its first response, on a data directory that exists."""
    started = time.monotonic()
    paths = {"PYTHONPATH": str(checkout.path / "src")}
    with Server(data_dir=str(data_dir), **paths) as serving:
        ready = time.monotonic()
        serving.client().call("GET", "/api/v1/sessions?limit=1")
        answered = time.monotonic()
    return {"from start to ready": (ready - started) * 1000, RESPONSE: (answered - started) * 1000}


SCENARIOS: dict[str, Callable[[Checkout, Path], dict[str, float]]] = {
    "sync": partial(library, program=SYNC),
    "async": partial(library, program=ASYNC),
    "filling": partial(library, program=FILLING),
    "run": command_line,
    "serve": server,
}
TITLES = {
    "sync": "Atoll()",
    "async": "AsyncAtoll()",
    "filling": "Atoll() that is closed while its pool is refilling",
    "run": "atoll run -c",
    "serve": "atoll serve",
}


ASKED = {
    ("sync", ALL): goals.EMBEDDED,
    ("run", ALL): goals.ATOLL_RUN,
    ("serve", RESPONSE): goals.SERVER_START,
}


def arguments() -> argparse.Namespace:
    options = parser("embedded", __doc__)
    options.add_argument("--parts", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--beside", type=Path, help="another checkout, to compare with")
    return options.parse_args()


def measure(report: Report, part: str, checkouts: list[Checkout], rounds: int) -> None:
    report.section(TITLES[part])
    taken: dict[str, list[dict[str, float]]] = {each.name: [] for each in checkouts}
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as data_dir:
        for number in range(rounds + 1):
            for checkout in checkouts:
                steps = SCENARIOS[part](checkout, Path(data_dir))
                if number > 0:  # The first round compiles modules.
                    taken[checkout.name].append(steps)
    for step in taken[checkouts[0].name][0]:
        rows = [
            samples(step + each.name, [steps[step] for steps in taken[each.name]])
            for each in checkouts
        ]
        report.show({row.name: row for row in rows}, [step])
        if goal := ASKED.get((part, step)):
            report.goal(goal, rows[0].p50)


def main() -> None:
    given = arguments()
    checkouts = [Checkout("", HERE)]
    if given.beside is not None:
        checkouts.append(Checkout(f", {given.beside.name}", given.beside.absolute()))
    with Report("embedded", given.json) as report:
        report.section("floor")
        bare = [sys.executable, "-c", "pass"]
        floor = timed("python -c pass", lambda: subprocess.run(bare, check=True), count=20)
        report.add(floor, ours=False)
        for part in given.parts:
            measure(report, part, checkouts, given.rounds)


if __name__ == "__main__":
    main()
