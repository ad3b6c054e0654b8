"""
Real servers for the tests: each on a free port with its own data, killed and started on request.

A missing server is reported by `tests.missing`.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from tests.missing import missing

EXTRA_PATHS = ("/usr/sbin", "/usr/local/sbin")
# Below the range of client ports, so that no client takes one before the server does. Each worker
# has its own. Tests that it starts have the same ones, in another order.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(10_000, 32_000)[_WORKER::_WORKERS]
_ports = itertools.cycle(random.SystemRandom().sample(_PORTS, len(_PORTS)))


def program(name: str, package: str, *places: str) -> str:
    """Where a server's program is; `places` are directories beyond the usual ones."""
    found = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), *EXTRA_PATHS, *places])
    )
    if found is not None:
        return found
    missing(f"{name} is not installed (package {package})")


def free_port() -> int:
    """A port without a listener, different each time."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until_ready(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server that was just started; a failure contains its log."""
    deadline = monotonic() + 60
    while not ready():
        if process.poll() is not None or monotonic() > deadline:
            raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")
        sleep(0.02)
