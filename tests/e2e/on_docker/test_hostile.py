"""Code that means harm, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    (
        "0/1",
        "hostile/test_kernel.py hostile/test_network.py hostile/test_host_files.py "
        "hostile/test_journal.py",
    ),
    ("0/1", "hostile/test_inside.py hostile/test_results.py hostile/test_standstill.py"),
    ("0/2", "hostile/test_processes.py hostile/test_exhaustion.py"),
    ("0/8", "hostile/test_files_api.py hostile/test_trees_api.py hostile/test_contexts.py"),
]


@pytest.mark.parametrize(("share", "suites"), SUITES)
def test_containers_hold_what_local_instances_hold(
    share: str, suites: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    run(share, suites, dockerd, tmp_path)
