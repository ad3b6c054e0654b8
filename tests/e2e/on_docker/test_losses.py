"""Servers and containers that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    ("0/8", "test_recovery.py"),
    ("0/3", "test_health_at_need.py test_checkpoints.py test_chaos.py"),
]


@pytest.mark.parametrize(("share", "suites"), SUITES)
def test_nothing_is_lost_with_a_container(
    share: str, suites: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    run(share, suites, dockerd, tmp_path)
