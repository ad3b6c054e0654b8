"""
The supervisor's side of the zygote: starts it, hands it jobs, and replaces it when it dies.

User code can kill or stop the zygote. A replacement is started at once; observers decide what
happens to their jobs and processes.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os

from ...protocol import minijson
from .. import processes
from ..connection import Refusal, Stream
from ..event_loop import READ, Loop
from ..output_tail import OutputTail
from . import jobs, zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

MAX_STARTS = 5
"""How often in a row a zygote may die before it is ready."""
NO_ZYGOTE = 70
"""Exit status of an instance whose zygote does not start."""


class ZygoteObserver:
    """
    Receives notifications from a `ZygoteClient`. Subclasses override the methods that they need.
    """

    def zygote_started(self, pid: int) -> None: ...

    def zygote_ready(self) -> None: ...

    def jobs_accepted(self) -> None:
        """The driver has confined the zygote: from now on it takes jobs."""

    def job_taken(self, number: int, pid: int) -> bool:
        """A process took a job; returns whether the job was this observer's."""
        return False

    def child_exited(self, pid: int, status: int, usage: dict[str, float]) -> None: ...

    def children_wanted(self) -> int:
        """Children of the zygote that this observer uses or is about to use."""
        return 0

    def zygote_lost(self) -> None:
        """The zygote died. Its children are now children of PID 1; a new one is about to start."""


class ZygoteClient:
    def __init__(self, loop: Loop, config: dict[str, Any], own_processes: set[int]) -> None:
        self._loop = loop
        self._config = config
        self._own_processes = own_processes
        self._observers: list[ZygoteObserver] = []
        self._starts = 0
        self._ready = False
        self._waiting: list[Stream] = []
        """`release` requests that wait until the zygote is ready."""
        self._preload_failed: dict[str, str] = {}
        self._children_wanted = 1
        self._control: _socket.socket
        self._job_socket: _socket.socket
        self._output: OutputTail
        self.pid = 0
        self.accepts_jobs = False

    def subscribe(self, *observers: ZygoteObserver) -> None:
        self._observers += observers

    def start(self) -> None:
        if self._starts >= MAX_STARTS:
            # The instance cannot run anything, so it exits.
            _explain_exit(self._output.last)
            os._exit(NO_ZYGOTE)
        self._starts += 1
        self._ready = self.accepts_jobs = False
        self._preload_failed = {}
        self._children_wanted = 1
        started = zygote.start(
            self._config.get("preload", []),
            bool(self._config.get("hooks", True)),
            self._config.get("packages", ""),
            int(self._config.get("oom_score", 0)),
        )
        self._own_processes.discard(self.pid)
        self.pid, self._control, self._job_socket = started.pid, started.control, started.job_socket
        self._own_processes.add(self.pid)
        self._output = OutputTail(self._loop, started.output)
        for observer in self._observers:
            observer.zygote_started(self.pid)
        self._loop.add(self._control.fileno(), READ, lambda mask: self._read())

    # Jobs

    def send_job(self, number: int, job: dict[str, Any], descriptors: list[int]) -> None:
        """Raises OSError if the queue is full or the zygote is gone."""
        jobs.send(self._job_socket, number, job, descriptors)

    def poll_taken(self) -> None:
        """
        Read which processes took which jobs. Polled, because most runs end before it is needed.
        """
        self._report_taken(jobs.taken(self._job_socket))

    def _report_taken(self, taken: list[tuple[int, int]]) -> None:
        for number, pid in taken:
            for observer in self._observers:
                if observer.job_taken(number, pid):
                    break

    def adjust_children(self) -> None:
        """Have the zygote keep as many children as the observers want."""
        wanted = sum(observer.children_wanted() for observer in self._observers)
        if wanted != self._children_wanted and self.accepts_jobs:
            self._children_wanted = wanted
            try:
                self._control.send(zygote.WANTED + b"%d" % wanted)
            except OSError:
                pass  # It has exited; the event loop is about to handle that.

    def release(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        The request `release`: the zygote is in its control group and may fork. Answered when it is
        ready. The request names the zygote, which may have been replaced meanwhile.
        """
        if request["zygote"] != self.pid:
            raise Refusal("zygote_replaced", "zygote %s has ended" % request["zygote"])
        if self._ready:
            self._release(stream)
        else:
            self._waiting.append(stream)

    def _release(self, stream: Stream) -> None:
        if not self.accepts_jobs:
            self.accepts_jobs = True
            self._children_wanted = 0
            for observer in self._observers:
                observer.jobs_accepted()
            self.adjust_children()
        stream.end({"preload_failed": self._preload_failed})

    # What the zygote reports

    def _read(self) -> None:
        while True:
            try:
                message = self._control.recv(zygote.MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lost()
                return
            if message[:1] == zygote.READY:
                self._became_ready(message[1:])
            else:
                self._child_exited(message[1:])

    def _became_ready(self, body: bytes) -> None:
        self._ready = True
        self._starts = 0
        for observer in self._observers:
            observer.zygote_ready()
        self._preload_failed = minijson.loads(body)
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            self._release(stream)

    def _child_exited(self, body: bytes) -> None:
        pid, status, user, system, peak, read, written = zygote.EXIT.unpack(body)
        usage = {
            "cpu": (user + system) / 1e6,
            "peak": peak * 1024,
            "read": read,
            "written": written,
        }
        self.poll_taken()
        for observer in self._observers:
            observer.child_exited(pid, status, usage)
        self.adjust_children()

    def _lost(self) -> None:
        """User code killed it, or the kernel did for memory."""
        self._report_taken(jobs.recall(self._job_socket))
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            # They concern the old zygote: the new one is not in its control group yet.
            stream.error("zygote_replaced", "zygote %d has ended" % self.pid)
        self._loop.remove(self._control.fileno())
        self._control.close()
        self._job_socket.close()
        self._output.close()
        for observer in self._observers:
            observer.zygote_lost()
        self.start()

    def children(self) -> list[processes.Process]:
        found = (processes.read(pid) for pid in processes.children_of(self.pid))
        return [child for child in found if child is not None]

    def kill_if_stopped(self) -> None:
        """A zygote that user code has stopped reports no exits: replace it."""
        try:
            stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return
        if stopped is not None:
            processes.send(self.pid, signal.SIGKILL)


def _explain_exit(printed: bytes) -> None:
    try:
        os.write(2, printed + b"atoll: the zygote does not start\n")
    except OSError:
        pass  # The control plane that reads it is gone.
