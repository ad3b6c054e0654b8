"""Servers and containers that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    "test_recovery.py 0/4",
    "test_recovery.py 2/4",
    "test_health_at_need.py",
    "test_checkpoints.py 0/2",
    "test_chaos.py 0/4",
]


@pytest.mark.parametrize("suite", SUITES)
def test_nothing_is_lost_with_a_container(suite: str, dockerd: Dockerd, tmp_path: Path) -> None:
    run(suite, dockerd, tmp_path)
