"""
Servers, executors, zygotes, instances and links die while clients work: nothing accepted is lost,
nothing is said to have run that did not, and nothing is run twice where that is promised.

`make chaos` does the same for minutes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.chaos.torment import torment

SECONDS = 4.0
SEEDS = (42, None)
"""One that is always the same, and one that is new each time and printed."""


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
