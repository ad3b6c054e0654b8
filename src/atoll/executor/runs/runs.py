"""
The runs of this instance: from their hand-over to a process until their result is acknowledged.

Output up to the limit and the result of a run stay in memory, and the result also in the journal,
until the control plane has acknowledged them. Of a run with a terminal the log keeps the last
output.

An id is run once: a run whose result was acknowledged is refused. So a replica that was considered
lost and returns cannot run anything a second time.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os

from .. import processes
from ..callbacks import Callbacks
from ..connection import Refusal, Stream, StreamHandler
from ..event_loop import Loop
from ..files.outputs import FAILURE, INTERRUPTED, SUCCESS, Outputs
from ..interpreter.child import OUT_OF_MEMORY
from ..interpreter.zygote_client import ZygoteClient, ZygoteObserver
from . import terminal
from .journal import Journal
from .memory_kills import MemoryKills
from .pipes import OrphanedOutputs
from .process_table import ProcessTable
from .run import NO_USAGE, Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WATCH_DELAY = 0.002
"""A run that ends sooner is never watched: its output is read at its end."""
DEFAULT_HEARTBEAT = 5.0
UNPARK_DELAY = 0.05
TAKEN_CHECK_INTERVAL = 0.1
JOB_FIELDS = (
    "kind",
    "code",
    "command",
    "args",
    "cwd",
    "limits",
    "function",
    "event",
    "body",
    "return_limit",
    "terminal",
    "id",
)
"""Fields of the request that the process of a run needs."""
MAX_LOST_ZYGOTES = 5
"""Zygotes that may die while a run waits to begin; one more fails the run."""
UNTAKEN_GRACE = 1.0
"""Time for a process to take a run that is to be ended."""
SIGNAL_DELAY = 0.01
"""Pause before a signal to a run that no process has taken yet."""
MAX_REMEMBERED = 512
"""Acknowledged ids that are remembered."""


class _Expectation(StreamHandler):
    """A stream that follows a run as soon as it is requested."""

    def __init__(
        self, expected: dict[str, list[_Expectation]], run_id: str, stream: Stream, after: int
    ) -> None:
        self._expected = expected
        self._run_id = run_id
        self.stream = stream
        self.after = after
        expected.setdefault(run_id, []).append(self)

    def dropped(self) -> None:
        waiting = self._expected[self._run_id]
        waiting.remove(self)
        if not waiting:
            del self._expected[self._run_id]


class Runs(ZygoteObserver):
    def __init__(
        self,
        loop: Loop,
        zygote: ZygoteClient,
        table: ProcessTable,
        outputs: Outputs,
        journal: Journal,
        callbacks: Callbacks,
    ) -> None:
        self._loop = loop
        self._memory_kills = MemoryKills()
        self._zygote = zygote
        self.table = table
        self._outputs = outputs
        self._journal = journal
        self._callbacks = callbacks
        self._runs: dict[str, Run] = {}
        self._acknowledged: dict[str, None] = {}
        self._expected: dict[str, list[_Expectation]] = {}
        """Streams that wait for runs that have not been requested yet."""
        self._jobs = 0
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._orphaned_outputs = OrphanedOutputs(loop)

    def active(self) -> list[Run]:
        return [run for run in self._runs.values() if run.result is None]

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def is_acknowledged(self, run_id: str) -> bool:
        return run_id in self._acknowledged

    def of_process(self, pid: int) -> Run | None:
        """The active run that a process belongs to."""
        self._zygote.poll_taken()
        return self.table.run_of(pid)

    def summary(self) -> list[dict[str, Any]]:
        """The runs that are not acknowledged, for a hello."""
        return [{"id": run.id, "ended": run.result is not None} for run in self._runs.values()]

    def restore(self) -> None:
        """Load results that an earlier executor left in the journal."""
        for run_id, result, log in self._journal.load():
            run = Run({"id": run_id}, self._loop)
            run.parked = False
            run.log.restore(log, result)
            run.exited, run.result = True, result
            self._runs[run_id] = run
            self._callbacks.run_ended(run)

    # Start

    def next_job_number(self) -> int:
        self._jobs += 1
        return self._jobs

    def hand_over(self, run: Run) -> None:
        """Give a run to the next spare child of the zygote."""
        descriptors = self.open(run)
        try:
            # Before anything else: a process is waiting for it.
            self._zygote.send_job(run.job_number, self._job(run), descriptors)
        except OSError as error:
            self.park(run)
            raise Refusal("executor_busy", "the run could not be handed over: %s" % error) from None
        finally:
            for fd in descriptors:
                os.close(fd)
        self.begin(run)

    def _job(self, run: Run) -> dict[str, Any]:
        job = {name: run.request.get(name) for name in JOB_FIELDS}
        job["env"] = self.variables(run)
        return job

    def variables(self, run: Run) -> dict[str, str]:
        """The variables that the run's process gets. Also makes its staging area."""
        staging = self._outputs.make_staging(run.id)
        return {"ATOLL_EXECUTION_ID": run.id, **run.request["env"], "ATOLL_STAGING": staging}

    def open(self, run: Run) -> list[int]:
        """
        Number the job and make the run's pipes. Returns the ends for its process; the caller closes
        them.
        """
        run.job_number = self.next_job_number()
        run.start_clock()
        try:
            return run.pipes.open(self._null)
        except BaseException:
            self.park(run)
            raise

    def enter(self, run: Run, stream: Stream) -> None:
        """Register the run. From now on it can be found, and its time-out counts."""
        self._runs[run.id] = run
        run.deadline = self._loop.after(
            run.request["timeout"], lambda: self.end(run, "timeout", 0.0)
        )
        run.log.follow(stream, 0)
        for waiting in self._expected.pop(run.id, []):
            run.log.follow(waiting.stream, waiting.after)

    def begin(self, run: Run) -> None:
        """The run is on its way to a process."""
        run.parked = False
        self._callbacks.run_began(run)
        run.watch_timer = self._loop.after(WATCH_DELAY, lambda: self._watch(run))
        run.pipes.feed()

    def park(self, run: Run) -> None:
        """No process took the run: close its pipes until it is handed over again."""
        run.parked = True
        for timer in (run.watch_timer, run.heartbeat):
            if timer is not None:
                timer.cancel()
        run.pipes.close()

    def _unpark(self) -> None:
        for run in self.active():
            if run.parked and self._zygote.accepts_jobs:
                try:
                    self.hand_over(run)
                except (Refusal, OSError):
                    # More than the socket holds.
                    self._loop.after(UNPARK_DELAY, self._unpark)
                    break
        self._zygote.adjust_children()

    def expect(self, run_id: str, stream: Stream, after: int) -> None:
        """Attach to a run as soon as it is requested."""
        stream.handle(_Expectation(self._expected, run_id, stream, after))

    # The zygote

    def jobs_accepted(self) -> None:
        self._unpark()

    def job_taken(self, number: int, pid: int) -> bool:
        for run in self._runs.values():
            if run.job_number == number:
                run.pid = pid
                self.table.leaders[pid] = run
                run.pipes.taken()
                if run.reason is not None:
                    processes.kill_tree(pid)
                return True
        return False

    def children_wanted(self) -> int:
        # None ahead before the first run: instances that were never used stay smaller.
        ahead = 1 if self._jobs else 0
        return max(ahead, sum(not run.in_context for run in self.active()))

    def child_exited(self, pid: int, status: int, usage: dict[str, float]) -> None:
        """The first process of a run exited: read the rest of its output, and make the result."""
        run = self.table.leaders.pop(pid, None)
        if run is not None:
            self.conclude(run, status, usage)

    def zygote_lost(self) -> None:
        for run in self.active():
            if run.parked or run.in_context:
                continue
            if run.pid:
                self._end_orphan(run.pid)
            elif run.reason is not None or run.lost_zygotes >= MAX_LOST_ZYGOTES:
                self._end_unstarted(run)
            else:
                # No process took it, so it has not begun.
                run.lost_zygotes += 1
                self.park(run)

    def _end_orphan(self, pid: int) -> None:
        """End the run of a process whose zygote died; the process is now a child of PID 1."""
        run = self.table.leaders.get(pid)
        if run is None:
            return
        if processes.read(pid) is None:
            # The zygote reaped it and died before it could report that.
            self.table.leaders.pop(pid)
            self.conclude(run, signal.SIGKILL, dict(NO_USAGE))
        elif run.reason is None:
            processes.kill_tree(pid)

    # While it runs

    def _watch(self, run: Run) -> None:
        self._zygote.poll_taken()
        if not run.pid:
            self._watch_untaken(run)
        run.pipes.watch()
        run.heartbeat = self._loop.after(_heartbeat(run), lambda: self._beat(run))
        run.log.begun = True
        run.log.announce()

    def _watch_untaken(self, run: Run) -> None:
        """
        Watch a run until a child of the zygote takes it: replace children that user code has
        stopped, and hand the run over again when the child that received it has died.
        """
        number = run.job_number

        def check() -> None:
            children = self._zygote.children()
            # After reading their states: a stopped child has announced by now what it received.
            self._zygote.poll_taken()
            if run.job_number != number or run.pid or run.parked or run.exited:
                return
            if run.pipes.abandoned:
                # A process received it and never announced it, so it has not begun.
                self._hand_over_again(run)
                return
            self.table.kill_stopped_spares(children)
            self._loop.after(TAKEN_CHECK_INTERVAL, check)

        self._loop.after(TAKEN_CHECK_INTERVAL, check)

    def _hand_over_again(self, run: Run) -> None:
        if run.reason is not None:
            self._end_unstarted(run)
        else:
            self.park(run)
            self._unpark()

    def _beat(self, run: Run) -> None:
        run.log.beat()
        run.heartbeat = self._loop.after(_heartbeat(run), lambda: self._beat(run))

    def add_entry(self, run: Run, channel: int, line: bytes) -> None:
        """Add a line of JSON to the run's log and send it at once."""
        if run.result is None:
            run.log.add(channel, line)

    def send_signal(self, run: Run, number: int) -> None:
        """To the foreground process group of its terminal, or else to the run's process group."""
        group, keyboard = 0, run.pipes.terminal_fd
        if keyboard >= 0:
            group = terminal.foreground(keyboard)
        if run.in_context:
            processes.send(run.pid, number)
        elif group or run.pid:
            try:
                os.killpg(group or run.pid, number)
            except ProcessLookupError:
                pass  # It is just exiting.
        elif run.result is None and not run.parked:
            # On its way to a process, which must receive the signal.
            self._loop.after(SIGNAL_DELAY, lambda: self._signal_later(run, number))

    def _signal_later(self, run: Run, number: int) -> None:
        self._zygote.poll_taken()
        self.send_signal(run, number)

    # End

    def end(self, run: Run, reason: str, grace: float) -> None:
        """
        Send SIGTERM to all processes of a run, and kill them after `grace` seconds. The first
        reason is kept.
        """
        if not run.accepts_requests:
            return
        self._zygote.poll_taken()
        run.reason = reason
        run.notify_end()
        if run.parked:
            self._end_unstarted(run)
        elif run.in_context:
            run.stop_in_context(reason, grace)
        elif not run.pid:
            # `job_taken` sees the reason. If no process can be forked, no process takes the run.
            run.kill_timer = self._loop.after(UNTAKEN_GRACE, lambda: self._kill_background(run))
        elif grace <= 0:
            processes.kill_tree(run.pid)
        else:
            for pid in [run.pid, *processes.descendants([run.pid])]:
                processes.send(pid, signal.SIGTERM)
            run.kill_timer = self._loop.after(grace, lambda: processes.kill_tree(run.pid))

    def _kill_background(self, run: Run) -> None:
        """Kill all background processes, because they prevent the run from starting."""
        self._zygote.poll_taken()
        if not run.pid and run.result is None:
            processes.kill_everything()

    def _end_unstarted(self, run: Run) -> None:
        run.cancel_timers()
        run.exited = True
        run.notify_end()
        run.result = run.make_result(signal.SIGKILL, dict(NO_USAGE))
        self._settle(run)

    def conclude(self, run: Run, status: int, usage: dict[str, float]) -> None:
        """The run's process exited, or its context finished it."""
        run.exited = True
        run.notify_end()
        result = run.make_result(status, usage)
        run.cancel_timers()
        run.pipes.take()
        if run.reason is None:
            self.table.leave_in_background(run)
            self._collect(run, status, result)
        else:
            # Before the result: its receiver may start the next run, which must not be killed too.
            self.table.kill_strays(lambda: self._collect(run, status, result))

    def _collect(self, run: Run, status: int, result: dict[str, Any]) -> None:
        """Add staged files and artifacts to the result."""
        if run.reason is None and "DATA" in run.request["limits"] and status == OUT_OF_MEMORY << 8:
            run.reason = "memory"
        # Otherwise the driver finds out.
        watched = bool(run.request["watch"].get("memory"))
        if watched and status and self._memory_kills.take() and run.reason is None:
            run.reason = "memory"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._free_memory(run)
        result["reason"] = run.reason
        result["sizes"] = run.pipes.sizes()

        def done(
            problem: dict[str, str] | None, artifacts: list[dict[str, Any]], cut: bool
        ) -> None:
            result["error"] = problem
            result["artifacts"], result["artifacts_cut"] = artifacts, cut
            run.result = result
            self._settle(run)

        interrupted = run.reason is not None or result["signal"] is not None
        self._outputs.collect(
            run.id,
            run.started_ns,
            run.request["artifact_limit"],
            INTERRUPTED if interrupted else FAILURE if status else SUCCESS,
            self._may_have_processes(run),
            done,
        )

    def _free_memory(self, killed: Run) -> None:
        """
        Remove System V objects after a run that was killed, if nothing else runs. They outlive
        their process: when the kernel killed it for memory, the next run would have none either.
        """
        others = any(run is not killed for run in self.active())
        if self.table.background or self.table.contexts or others:
            return
        from . import kernel_memory

        try:
            kernel_memory.remove_system_v()
        except OSError:
            pass  # The kernel does not support them; gVisor, for example.

    def _may_have_processes(self, run: Run) -> bool:
        """Whether processes may be left after its end."""
        return bool(self.table.background) or run.in_context

    def _settle(self, run: Run) -> None:
        """Make the result known."""
        assert run.result is not None
        # Output that background processes still write is read, so that they do not block.
        run.pipes.settle(self._orphaned_outputs if self._may_have_processes(run) else None)
        run.leave_context()
        run.result["entries"] = run.log.last
        if run.result["reason"] != "shutdown":
            # Before the result is sent, because this process may exit right after. A run that a
            # shutdown ended is not journaled: its result must not be taken for the run's own end.
            self._journal.append(run.id, run.result, run.log.numbered())
            self._callbacks.run_ended(run)
        run.log.end(run.result)

    def acknowledge(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.result is not None:
            del self._runs[run_id]
            self._journal.drop(run_id)
            self._callbacks.run_acknowledged(run_id)
            self._acknowledged[run_id] = None
            if len(self._acknowledged) > MAX_REMEMBERED:
                del self._acknowledged[next(iter(self._acknowledged))]


def _heartbeat(run: Run) -> float:
    return float(run.request.get("heartbeat") or DEFAULT_HEARTBEAT)
