"""
The suites that say something about a driver, once more on a Docker engine.

Each is a pytest of its own with `TEST_DRIVER=docker`, on the engine that the tests have running.
Here are as many as a run of all tests has time for; `make test-docker` runs all of them in full.
Three files, because the tests of one go one after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.servers.docker import Dockerd

TOP = Path(__file__).resolve().parents[3]
SECONDS = 280.0


def run(share: str, suites: str, engine: Dockerd, place: Path) -> None:
    """`suites` are files beneath tests/e2e; of their tests those of a share, as TEST_SHARE says."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            f"--basetemp={place / 'tests'}",
            *(str(TOP / "tests/e2e" / suite) for suite in suites.split()),
        ],
        cwd=TOP,
        env={
            **os.environ,
            "TEST_DRIVER": "docker",
            "TEST_DOCKER_URL": engine.url,
            "TEST_SHARE": share,
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
