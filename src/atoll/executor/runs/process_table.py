"""
Maps processes to runs, and kills processes that belong to no run.

A process that escaped from its run's tree becomes a child of PID 1: a stray. If a run exits
normally, its strays may continue in the background; if it was ended, they are killed.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]

from .. import processes
from ..event_loop import Loop
from .run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

RETRY_DELAY = 0.05
SINGLE_ROUNDS = 2
"""Rounds in which strays are killed one by one; later rounds kill everything."""
MAX_ROUNDS = 40
"""Rounds after which the result is sent although strays are left."""
CONFIRMATIONS = 4
"""
Searches in a row that must find none: a single search can miss processes that keep replacing each
other.
"""
MAX_ANCESTORS = 1024


class ProcessTable:
    def __init__(self, loop: Loop, own_processes: set[int]) -> None:
        self._loop = loop
        self._own = own_processes
        """Children of PID 1 that do not run user code."""
        self.leaders: dict[int, Run] = {}
        """The first process of each run outside of contexts."""
        self.contexts: dict[int, Run | None] = {}
        """Processes of contexts, with the run that each executes now."""
        self.background: dict[int, str] = {}
        """Processes that a run left behind, with its id."""

    def run_of(self, pid: int) -> Run | None:
        """The active run that a process belongs to."""
        for _ in range(MAX_ANCESTORS):
            run = self.leaders.get(pid) or self.contexts.get(pid)
            if run is not None:
                return run
            process = processes.read(pid)
            if process is None or process.parent <= 1:
                return None
            pid = process.parent
        return None

    def is_leader(self, pid: int) -> bool:
        """Whether this is the first process of a run, or the process of a context."""
        return pid in self.leaders or pid in self.contexts

    def is_own(self, pid: int) -> bool:
        return pid in self._own

    def kill_stopped_spares(self, children: list[processes.Process]) -> None:
        """
        Kill children of the zygote that user code has stopped before they took a job; the zygote
        replaces them.
        """
        for child in children:
            if child.state in "Tt" and not self.is_leader(child.pid):
                processes.send(child.pid, signal.SIGKILL)

    def _strays(self) -> list[int]:
        return [
            pid
            for pid in processes.children_of(1)
            if pid not in self.background
            and not self.is_own(pid)
            and not self.is_leader(pid)
            and processes.is_alive(pid)
        ]

    def leave_in_background(self, run: Run) -> None:
        for pid in self._strays():
            self.background[pid] = run.id

    def kill_strays(self, then: Callable[[], None] = lambda: None, rounds: int = 0) -> None:
        """Kill strays, if need be together with everything else, and then call `then`."""
        strays = self._strays()
        if not strays or rounds == MAX_ROUNDS:
            then()
            self._confirm(CONFIRMATIONS)
            return
        if rounds < SINGLE_ROUNDS:
            processes.kill_tree(*strays)
        else:
            processes.kill_everything()
        self._loop.after(RETRY_DELAY, lambda: self.kill_strays(then, rounds + 1))

    def _confirm(self, searches: int) -> None:
        if searches == 0:
            return

        def search() -> None:
            strays = self._strays()
            if strays:
                processes.kill_tree(*strays)
            self._confirm(CONFIRMATIONS if strays else searches - 1)

        self._loop.after(RETRY_DELAY, search)
