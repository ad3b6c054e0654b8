"""
Servers, executors, zygotes, instances and links die while clients work: no accepted execution is
lost, none is reported as run that did not run, and none is run twice unless that is documented.

`make chaos` does the same for minutes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import drivers
from tests.e2e.chaos.torment import torment

# On a cluster there are more kinds of faults, and they last longer.
SECONDS = 10.0 if drivers.CHOSEN == "kubernetes" else 4.0
SEEDS = (42, None)
"""A fixed seed, and a random one that is printed."""


@pytest.mark.every_driver
@pytest.mark.parametrize("seed", SEEDS)
def test_no_execution_is_lost_or_repeated_while_servers_and_instances_die(
    bubblewrap: str, tmp_path: Path, seed: int | None
) -> None:
    if seed is None:
        seed = random.randrange(1_000_000)
        print("seed", seed)
    print(torment(tmp_path, seed, SECONDS))


def test_no_execution_is_lost_or_repeated_while_one_of_two_servers_dies(
    bubblewrap: str, tmp_path: Path
) -> None:
    print(torment(tmp_path, 3, SECONDS, size=2))
