"""One run: its request, its process and its log."""

from __future__ import annotations

import os
import time

from ..event_loop import Loop, Timer
from ..files import artifacts
from .log import Log
from .pipes import Pipes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

NO_USAGE = {"cpu": 0.0, "peak": 0, "read": 0, "written": 0}


class Run:
    def __init__(self, request: dict[str, Any], loop: Loop) -> None:
        self.id: str = request["id"]
        self.job_number = 0
        """Number of the latest job that carries it to a process; 0 before the first."""
        self.request = request
        self.log = Log(loop, request["output_limit"] if request.get("terminal") else None)
        self.pipes = Pipes(loop, self.log, request)
        self.pid = 0
        self.parked = True
        """Accepted, and not handed to a zygote yet."""
        self.lost_zygotes = 0
        """Zygotes that died before a process had taken the run."""
        self.started = 0.0
        self.started_ns = 0
        """The start by the clock of file times."""
        self.start_clock()
        self.reason: str | None = None
        """The reason if the supervisor ended it; None otherwise."""
        self.exited = False
        """Whether its process has exited. After that its outcome does not change."""
        self.result: dict[str, Any] | None = None
        self.watch_timer: Timer | None = None
        self.deadline: Timer | None = None
        self.kill_timer: Timer | None = None
        self.heartbeat: Timer | None = None
        self._stop_in_context: Callable[[str, float], None] | None = None
        self.on_end: list[Callable[[], None]] = []
        """Called once, when it is being ended or has ended."""

    def run_in_context(self, stop: Callable[[str, float], None]) -> None:
        """The run ends by `stop`: the process of its context continues to exist."""
        self._stop_in_context = stop

    @property
    def in_context(self) -> bool:
        return self._stop_in_context is not None

    def stop_in_context(self, reason: str, grace: float) -> None:
        assert self._stop_in_context is not None
        self._stop_in_context(reason, grace)

    def leave_context(self) -> None:
        """Its result is known; the context keeps no reference to it."""
        self._stop_in_context = None

    @property
    def accepts_requests(self) -> bool:
        """Whether its code can still receive input, messages and answers."""
        return not self.exited and self.reason is None

    def start_clock(self) -> None:
        self.started = time.monotonic()
        self.started_ns = artifacts.coarse_now()

    def notify_end(self) -> None:
        callbacks, self.on_end = self.on_end, []
        for call in callbacks:
            call()

    def cancel_timers(self) -> None:
        for timer in (self.watch_timer, self.deadline, self.kill_timer, self.heartbeat):
            if timer is not None:
                timer.cancel()

    def make_result(self, status: int, usage: dict[str, float]) -> dict[str, Any]:
        """The part of the result that follows from the exit status of its process."""
        signalled = os.WIFSIGNALED(status)
        return {
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "reason": self.reason,
            "duration": time.monotonic() - self.started,
            "began": self.started_ns / 1e9,
            "usage": usage,
            "sizes": {},
            "error": None,
            "artifacts": [],
            "artifacts_cut": False,
        }
