"""Suspends processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic, sleep

STILL = "TtZX"


def stand_still(pid: int) -> None:
    """
    Stop a process, and wait until all its threads are stopped. `kill` only queues the signal: a
    running thread could still answer one request.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = monotonic() + 30
    while moving := [state for state in _states(pid) if state not in STILL]:
        assert monotonic() < deadline, f"threads of {pid} go on: {moving}"
        sleep(0.001)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            stat = thread.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name before it, in brackets, may hold anything.
        states.append(stat.rpartition(")")[2].split()[0])
    return states
