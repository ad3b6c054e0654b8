"""One context and its process, as the supervisor sees them."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import time

from . import processes
from .connection import Stream
from .event_loop import Timer
from .runs.run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

TICKS = os.sysconf("SC_CLK_TCK")


class ContextProcess:
    """One process of a context, from its job to its exit."""

    def __init__(self, context: Context, job_number: int) -> None:
        self.context = context
        self.job_number = job_number
        self.pid = 0
        self.zygote = 0
        """The zygote that forked it; 0 until a child has taken the job."""
        self.handed_over = False
        self.socket: _socket.socket | None = None
        self.ready = False
        self.ending = False
        self.exited = False
        self.problem: tuple[str, str] | None = None
        """Error code and message if it did not start."""
        self.display: bytearray | None = None
        """The display that is being received; None if it is dropped."""
        self.display_size = 0

    def interrupt(self) -> None:
        """Send SIGINT to the process group, as Ctrl-C does."""
        if self.pid:
            processes.send(-self.pid, signal.SIGINT)

    def usage(self) -> tuple[float, int]:
        """CPU seconds and peak memory, including those of children that have exited."""
        cpu, peak = 0.0, 0
        try:
            with open("/proc/%d/stat" % self.pid, "rb") as file:
                text = file.read()
            cpu = sum(int(ticks) for ticks in text[text.rindex(b")") + 2 :].split()[11:15]) / TICKS
            with open("/proc/%d/status" % self.pid, "rb") as file:
                for line in file:
                    if line.startswith(b"VmHWM:"):
                        peak = int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass  # It is exiting.
        return cpu, peak


class Context:
    def __init__(self, request: dict[str, Any]) -> None:
        self.id: str = request["id"]
        self.request = request
        self.created = time.time()
        self.execution_count = 0
        self.was_ready = False
        self.process: ContextProcess | None = None
        self.run: Run | None = None
        self.display_room = 0
        """Bytes of displays that the current run may still show."""
        self.reported_drop = False
        self.usage_before: tuple[float, int] = (0.0, 0)
        """Usage of the process when the current run began."""
        self.waiting: list[Stream] = []
        """Requests that are answered when the process is ready."""
        self.start_timer: Timer | None = None
        self.on_exit: list[Callable[[], None]] = []

    @property
    def state(self) -> str:
        if self.process is None or self.process.ending:
            return "dead"
        return "busy" if self.run is not None or not self.process.ready else "idle"

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "language": self.request["language"],
            "cwd": self.request["cwd"],
            "state": self.state,
            "created": self.created,
            "execution_count": self.execution_count,
        }
