"""Code that means harm, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    "hostile/test_processes.py",
    "hostile/test_exhaustion.py",
    "hostile/test_kernel.py",
    "hostile/test_network.py",
    "hostile/test_host_files.py",
    "hostile/test_inside.py",
    "hostile/test_journal.py",
    "hostile/test_results.py",
    "hostile/test_standstill.py",
    "hostile/test_files_api.py 0/4",
    "hostile/test_trees_api.py 0/4",
    "hostile/test_contexts.py 0/4",
]


@pytest.mark.parametrize("suite", SUITES)
def test_containers_hold_what_local_instances_hold(
    suite: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    run(suite, dockerd, tmp_path)
