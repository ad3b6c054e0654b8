"""Sessions, what they run and their files, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.on_docker import run
from tests.servers.docker import Dockerd

SUITES = [
    ("0/4", "test_lifecycle.py test_pool.py"),
    (
        "0/8",
        "test_sessions.py test_executions.py test_files_api.py test_contexts.py "
        "test_console.py test_volumes.py",
    ),
]


@pytest.mark.parametrize(("share", "suites"), SUITES)
def test_sessions_live_in_containers_as_they_do_on_the_machine(
    share: str, suites: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    run(share, suites, dockerd, tmp_path)
