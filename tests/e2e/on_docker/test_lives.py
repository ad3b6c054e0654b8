"""Sessions, what they run and their files, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    "test_lifecycle.py 0/3",
    "test_lifecycle.py 1/3",
    "test_lifecycle.py 2/3",
    "test_pool.py",
    "test_sessions.py 0/4",
    "test_executions.py 0/3",
    "test_files_api.py 0/4",
    "test_contexts.py 0/4",
    "test_console.py 0/4",
    "test_volumes.py 0/3",
]


@pytest.mark.parametrize("suite", SUITES)
def test_sessions_live_in_containers_as_they_do_on_the_machine(
    suite: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    run(suite, dockerd, tmp_path)
