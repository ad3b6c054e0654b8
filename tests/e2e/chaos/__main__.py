"""`make chaos`: plan after plan until the time is over, each from the next seed."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests import drivers
from tests.e2e.chaos.torment import torment
from tests.servers.kubernetes import background

ROUND = 20.0
"""Seconds of one plan."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long in all")
    parser.add_argument("--round", type=float, default=ROUND, help="seconds of each plan")
    parser.add_argument("--seed", type=int, help="the first seed; random when not given")
    parser.add_argument("--replicas", type=int, default=1, help="servers; several need Redis")
    asked = parser.parse_args()
    if drivers.CHOSEN == "kubernetes":
        background.run_with_cluster("tests.e2e.chaos")
    seed = random.randrange(1_000_000) if asked.seed is None else asked.seed
    with (
        tempfile.TemporaryDirectory(prefix="atoll-chaos-") as directory,
        drivers.chosen(Path(directory)),
    ):
        failed = _rounds(seed, asked)
    print(f"{failed} plans failed" if failed else "nothing was lost, nothing was done twice")
    return 1 if failed else 0


def _rounds(seed: int, asked: argparse.Namespace) -> int:
    """How many plans failed."""
    deadline = time.monotonic() + asked.seconds
    failed = 0
    while time.monotonic() < deadline:
        print(f"seed {seed}, {asked.round:g} s, {asked.replicas} server(s)", flush=True)
        with tempfile.TemporaryDirectory(prefix="atoll-chaos-") as directory:
            try:
                print(torment(Path(directory), seed, asked.round, size=asked.replicas), flush=True)
            except AssertionError as error:
                failed += 1
                # With the place: a check that only waits says no more.
                print("".join(traceback.format_exception(error)), flush=True)
        seed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
