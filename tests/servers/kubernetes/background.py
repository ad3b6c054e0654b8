"""Builds the programs of a cluster while other tests run, or before a program that needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.servers.kubernetes import binaries, go_programs, network

MARK = "TEST_NAMESPACE"
"""Set in a program that runs in the namespace."""
TOP = Path(__file__).parents[3]
# Ends with the process that waits for it.
_COMMAND = (
    "setpriv", "--pdeathsig", "TERM", "nice", "-n", "19", sys.executable, "-m", binaries.__name__,
)  # fmt: skip


@contextmanager
def building() -> Iterator[Callable[[], None]]:
    """
    Start the build if it is not cached, with the lowest priority. The function yielded waits for
    its end; after a failure `binaries.unpack` gives the reason. The end of the context ends the
    build.
    """
    if binaries.cached():
        yield lambda: None
        return
    with tempfile.TemporaryFile() as log:
        # Its own group, not a session, which would be scheduled as one with the priority of others.
        build = subprocess.Popen(_COMMAND, cwd=TOP, stdout=log, stderr=log, process_group=0)
        try:
            yield lambda: _finish(build, log)
        finally:
            build.terminate()
            build.wait()


def run_with_cluster(module: str) -> None:
    """
    Start this program again, `python -m module`, in a network namespace in which it may have a
    cluster, unless it is in one.
    """
    if MARK in os.environ:
        return
    with building() as finish:
        finish()
    os.environ[MARK] = "1"
    command = [*network.prefix(), sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp(command[0], command)


def _finish(build: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    if build.poll() is None:
        print("\n=== Building Kubernetes: once, up to 15 minutes", flush=True)
        # Nothing runs beside it any more. An ordinary user may not raise a priority.
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PGRP, build.pid, 0)
    code = build.wait()
    if code == 0:
        return
    log.seek(0)
    reason = log.read().decode(errors="replace").strip()[-2 * go_programs.MAX_LOG :]
    if code < 0:
        reason = f"{signal.Signals(-code).name} ended the build. {reason}"
    os.environ[go_programs.ERROR] = reason
    print(f"Kubernetes cannot be built: {reason}", flush=True)
