"""
Executions as the supervisor sees them: their process, their time, their end, and the journal.

A run's output up to the limit and its result stay in the journal until the control plane has
acknowledged them, whatever becomes of the connection meanwhile. Of a run on a terminal the log
keeps the last of what was written.

An id is run once: one whose result was acknowledged is refused. So a control plane that was given
up by the others and comes back cannot run anything a second time.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import time

from .. import processes
from ..callbacks import Reports
from ..connection import Stream
from ..event_loop import Loop, Timer
from ..files import artifacts
from ..files.staging import Staging
from ..interpreter.child import OUT_OF_MEMORY
from . import terminal
from .journal import Journal
from .log import Follower, Log
from .pipes import Leftovers, Pipes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

NO_USAGE = {"cpu": 0.0, "peak": 0, "read": 0, "written": 0}
STRAY_SECONDS = 0.05
STRAY_ROUNDS = 2
"""How often strays are ended one by one; then everything is."""
STRAY_LIMIT = 40
"""How often they are looked for before the result is sent though some are left."""
STRAY_CONFIRMATIONS = 4
"""How often none must be found in a row: one look misses a swarm that replaces itself."""
UNTAKEN_SECONDS = 1.0
SIGNAL_SECONDS = 0.01
"""Pause before a signal to a run that no process has taken yet."""
REMEMBERED = 512
"""How many of the last acknowledged ids are known."""
WATCH_SECONDS = 0.002
"""A run that ends sooner is never watched: what it wrote is read at its end."""
HEARTBEAT_SECONDS = 5.0
MAX_ANCESTORS = 1024


class Run:
    def __init__(self, request: dict[str, Any], loop: Loop) -> None:
        self.id: str = request["id"]
        self.number = 0
        """Of its latest hand-over to a process; 0 before the first."""
        self.request = request
        self.log = Log(loop, request["output_limit"] if request.get("terminal") else None)
        self.pipes = Pipes(loop, self.log, request)
        self.pid = 0
        self.parked = True
        """Accepted, and not yet handed to a zygote."""
        self.losses = 0
        """Zygotes that died with it before anybody took it."""
        self.started = time.monotonic()
        self.began = artifacts.coarse_now()
        self.reason: str | None = None
        """Why the supervisor ended it, when it did."""
        self.over = False
        """Whether its process has ended; what comes after that cannot be ended, or be its end."""
        self.result: dict[str, Any] | None = None
        self.watch: Timer | None = None
        self.deadline: Timer | None = None
        self.grace: Timer | None = None
        self.beat: Timer | None = None
        self.stop: Callable[[str, float], None] | None = None
        """How to end it, set by who carries it in a process that is not its own."""
        self.on_end: list[Callable[[], None]] = []
        """Told once, when it is being ended or has ended."""

    def ending(self) -> None:
        told, self.on_end = self.on_end, []
        for call in told:
            call()


class Runs:
    def __init__(
        self,
        loop: Loop,
        scanner: artifacts.Scanner,
        staging: Staging,
        hash_files: Callable[[list[dict[str, Any]], Callable[[], None]], None],
        see_taken: Callable[[], None],
        watch_untaken: Callable[[Run], None],
        kept: Journal,
        reports: Reports,
    ) -> None:
        self._loop = loop
        self._scanner = scanner
        self._staging = staging
        self._hash_files = hash_files
        self._see_taken = see_taken
        """Learns the pids of runs; asked for only when a run lasts, or has to end."""
        self._watch_untaken = watch_untaken
        """Called when a process should have taken a run and has not."""
        self._kept = kept
        self._reports = reports
        self._runs: dict[str, Run] = {}
        self._over: dict[str, None] = {}
        self._expected: dict[str, list[Follower]] = {}
        self._by_pid: dict[int, Run] = {}
        self._count = 0
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._left = Leftovers(loop)
        self.background: dict[int, str] = {}
        """Processes that an execution left running, with its id."""
        self.hosts: dict[int, Run | None] = {}
        """Processes that carry runs one after the other, with the one that is in it now."""

    def active(self) -> list[Run]:
        return [run for run in self._runs.values() if run.result is None]

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def is_over(self, run_id: str) -> bool:
        return run_id in self._over

    def of_process(self, pid: int) -> Run | None:
        """The run that a process belongs to, as long as it runs."""
        self._see_taken()
        for _ in range(MAX_ANCESTORS):
            run = self._by_pid.get(pid) or self.hosts.get(pid)
            if run is not None:
                return run
            process = processes.read(pid)
            if process is None or process.parent <= 1:
                return None
            pid = process.parent
        return None

    def by_number(self, number: int) -> Run | None:
        for run in self._runs.values():
            if run.number == number:
                return run
        return None

    def journal(self) -> list[dict[str, Any]]:
        return [{"id": run.id, "ended": run.result is not None} for run in self._runs.values()]

    def recall(self) -> None:
        """Know again what ended before this executor began, and was not acknowledged."""
        for run_id, result, log in self._kept.load():
            run = self.make({"id": run_id})
            run.parked = False
            run.log.restore(log, result)
            run.over, run.result = True, result
            self._runs[run_id] = run
            self._reports.ended(run)

    # Start

    def make(self, request: dict[str, Any]) -> Run:
        return Run(request, self._loop)

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def open(self, run: Run) -> list[int]:
        """
        Number this hand-over and make its pipes; the ends that go to the process, which the caller
        closes.
        """
        run.number = self.next_number()
        run.started = time.monotonic()
        run.began = artifacts.coarse_now()
        try:
            return run.pipes.open(self._null)
        except BaseException:
            self.park(run)
            raise

    def enter(self, run: Run, stream: Stream) -> None:
        """Into the journal: from now on it can be found, and its time counts."""
        self._runs[run.id] = run
        run.deadline = self._loop.after(
            run.request["timeout"], lambda: self.end(run, "timeout", 0.0)
        )
        self.attach(run, stream, 0)
        for follower in self._expected.pop(run.id, []):
            run.log.follow(follower)

    def begin(self, run: Run) -> None:
        """The run is on its way to a process."""
        run.parked = False
        self._reports.began(run)
        run.watch = self._loop.after(WATCH_SECONDS, lambda: self._watch(run))
        run.pipes.feed()

    def park(self, run: Run) -> None:
        """Nobody took it: close what was opened for it; it may be handed over once more."""
        run.parked = True
        for timer in (run.watch, run.beat):
            if timer is not None:
                timer.cancel()
        run.pipes.close()

    def _cancel_timers(self, run: Run) -> None:
        for timer in (run.watch, run.deadline, run.grace, run.beat):
            if timer is not None:
                timer.cancel()

    def taken(self, run: Run, pid: int) -> None:
        run.pid = pid
        self._by_pid[pid] = run
        run.pipes.taken()
        if run.reason is not None:
            processes.kill_tree(pid)

    def attach(self, run: Run, stream: Stream, after: int) -> None:
        """
        Send a run's events to this stream too, beginning behind sequence number `after`.
        """
        run.log.follow(Follower(stream, after))

    def expect(self, run_id: str, stream: Stream, after: int) -> None:
        """The same for a run that has not come yet."""
        follower = Follower(stream, after)
        waiting = self._expected.setdefault(run_id, [])
        waiting.append(follower)

        def leave() -> None:
            if follower in waiting:
                waiting.remove(follower)
            if not waiting:
                self._expected.pop(run_id, None)

        stream.on_reset = leave

    # While it runs

    def _watch(self, run: Run) -> None:
        self._see_taken()
        if not run.pid:
            self._watch_untaken(run)
        run.pipes.watch()
        run.beat = self._loop.after(self._heartbeat(run), lambda: self._beat(run))
        run.log.begun = True
        run.log.announce()

    def _heartbeat(self, run: Run) -> float:
        return float(run.request.get("heartbeat") or HEARTBEAT_SECONDS)

    def _beat(self, run: Run) -> None:
        run.log.beat()
        run.beat = self._loop.after(self._heartbeat(run), lambda: self._beat(run))

    def add_entry(self, run: Run, channel: int, line: bytes) -> None:
        """A line of JSON into the run's log, sent at once."""
        if run.result is None:
            run.log.add(channel, line)

    def send_signal(self, run: Run, number: int) -> None:
        """To what is in the foreground of its terminal, else to its process group."""
        group, keyboard = 0, run.pipes.terminal_fd
        if keyboard >= 0:
            group = terminal.foreground(keyboard)
        if run.stop is not None:
            processes.send(run.pid, number)
        elif group or run.pid:
            try:
                os.killpg(group or run.pid, number)
            except ProcessLookupError:
                pass  # It ends right now.
        elif run.result is None and not run.parked:
            # On its way to a process, which is to hear of it.
            self._loop.after(SIGNAL_SECONDS, lambda: self._signal_later(run, number))

    def _signal_later(self, run: Run, number: int) -> None:
        self._see_taken()
        self.send_signal(run, number)

    # End

    def end(self, run: Run, reason: str, grace: float) -> None:
        """End all of a run, at once or after asking it to; the first reason stays."""
        if run.over or run.reason is not None:
            return
        self._see_taken()
        run.reason = reason
        run.ending()
        if run.parked:
            self.never_began(run)
            return
        if run.stop is not None:
            run.stop(reason, grace)
            return
        if not run.pid:
            # `taken` sees the reason; but when there is no process to be had, nobody takes it.
            run.grace = self._loop.after(UNTAKEN_SECONDS, lambda: self._make_room(run))
            return
        if grace <= 0:
            processes.kill_tree(run.pid)
            return
        for pid in [run.pid, *processes.descendants([run.pid])]:
            processes.send(pid, signal.SIGTERM)
        run.grace = self._loop.after(grace, lambda: processes.kill_tree(run.pid))

    def _make_room(self, run: Run) -> None:
        """What earlier runs left behind keeps this one from beginning: all of it goes."""
        self._see_taken()
        if not run.pid and run.result is None:
            processes.kill_everything()

    def never_began(self, run: Run) -> None:
        """A run that no process took, for good."""
        self._cancel_timers(run)
        run.over = True
        run.ending()
        run.result = self._result(run, signal.SIGKILL, dict(NO_USAGE))
        self._settle(run)

    def exited(self, pid: int, status: int, usage: dict[str, float]) -> None:
        """The leader of a run is gone: read what is left, and make the result."""
        run = self._by_pid.pop(pid, None)
        if run is not None:
            self.conclude(run, status, usage)

    def conclude(self, run: Run, status: int, usage: dict[str, float]) -> None:
        run.over = True
        run.ending()
        result = self._result(run, status, usage)
        self._cancel_timers(run)
        run.pipes.take()
        if run.reason is None:
            self._leave_background(run)
            self._collect(run, status, result)
        else:
            # Before the result: its receiver may start the next run, which must not be killed too.
            self._end_strays(lambda: self._collect(run, status, result))

    def _collect(self, run: Run, status: int, result: dict[str, Any]) -> None:
        """Add to the result what the run left: staged files and artifacts."""
        if run.reason is None and "DATA" in run.request["limits"] and status == OUT_OF_MEMORY << 8:
            run.reason = "memory"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._free_memory(run)
        result["reason"] = run.reason
        result["sizes"] = run.pipes.sizes()
        success = run.reason is None and status == 0

        def staged(problem: dict[str, str] | None) -> None:
            result["error"] = problem
            self._list_artifacts(run, result)

        self._staging.settle(run.id, success, staged)

    def _free_memory(self, killed: Run) -> None:
        """
        Remove System V objects after a run that was killed, if nothing else runs. They outlive
        their process: when the kernel killed it for memory, the next run would have none either.
        """
        if self.background or self.hosts or any(run is not killed for run in self.active()):
            return
        from . import kernel_memory

        try:
            kernel_memory.remove_system_v()
        except OSError:
            pass  # A kernel that has none, as gVisor.

    def _list_artifacts(self, run: Run, result: dict[str, Any]) -> None:
        # Looked for in any case: what was changed just now is not the next run's.
        files, cut = self._scanner.changed_since(run.began, run.request["artifact_limit"])
        if result["reason"] is not None or result["signal"] is not None:
            # It was in the middle of something: its files may be half written.
            files, cut = [], False
        result["artifacts"], result["artifacts_cut"] = files, cut

        def finish() -> None:
            run.result = result
            self._settle(run)

        if files:
            self._hash_files(files, finish)
        else:
            finish()

    def _result(self, run: Run, status: int, usage: dict[str, float]) -> dict[str, Any]:
        signalled = os.WIFSIGNALED(status)
        return {
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "reason": run.reason,
            "duration": time.monotonic() - run.started,
            "began": run.began / 1e9,
            "usage": usage,
            "sizes": {},
            "error": None,
            "artifacts": [],
            "artifacts_cut": False,
        }

    def _settle(self, run: Run) -> None:
        assert run.result is not None
        # What somebody may still write is read, so that it does not wait for us for ever.
        left = self._left if self.background or run.stop is not None else None
        run.pipes.settle(left)
        run.stop = None
        run.result["entries"] = run.log.last
        if run.result["reason"] != "shutdown":
            # Before anybody is told: whoever is told may be gone, and this process too. One that
            # was ended for no fault of its own is none the next executor may take for its end.
            self._kept.append(run.id, run.result, run.log.numbered())
            self._reports.ended(run)
        run.log.end(run.result)

    def _strays(self) -> list[int]:
        """Living children of PID 1 that no run is known to have left."""
        return [
            pid
            for pid in processes.children_of(1)
            if pid not in self.background
            and pid not in self.own
            and not self.is_leader(pid)
            and processes.is_alive(pid)
        ]

    def is_leader(self, pid: int) -> bool:
        """Whether a run or a context is known to be this process."""
        return pid in self._by_pid or pid in self.hosts

    def end_strays(self) -> None:
        """End what a process left that was not meant to outlive it."""
        self._end_strays(lambda: None)

    def _leave_background(self, run: Run) -> None:
        for pid in self._strays():
            self.background[pid] = run.id

    def _end_strays(self, then: Callable[[], None], rounds: int = 0) -> None:
        """End what got away when its run was ended, if need be with everything else."""
        strays = self._strays()
        if not strays or rounds == STRAY_LIMIT:
            then()
            self._confirm_no_strays(STRAY_CONFIRMATIONS)
            return
        if rounds < STRAY_ROUNDS:
            processes.kill_tree(*strays)
        else:
            processes.kill_everything()
        self._loop.after(STRAY_SECONDS, lambda: self._end_strays(then, rounds + 1))

    def _confirm_no_strays(self, looks: int) -> None:
        if looks == 0:
            return

        def look() -> None:
            strays = self._strays()
            if strays:
                processes.kill_tree(*strays)
            self._confirm_no_strays(STRAY_CONFIRMATIONS if strays else looks - 1)

        self._loop.after(STRAY_SECONDS, look)

    own: frozenset[int] = frozenset()
    """Children of PID 1 that are not user code."""

    def crashed(self, pid: int) -> None:
        """The zygote that a run belonged to is gone; its leader is now a child of PID 1."""
        run = self._by_pid.get(pid)
        if run is None:
            return
        if processes.read(pid) is None:
            # The zygote had taken note of its end, and then could not tell.
            self._by_pid.pop(pid)
            self.conclude(run, signal.SIGKILL, dict(NO_USAGE))
        elif run.reason is None:
            processes.kill_tree(pid)

    def acknowledge(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.result is not None:
            del self._runs[run_id]
            self._kept.drop(run_id)
            self._reports.acknowledged(run_id)
            self._over[run_id] = None
            if len(self._over) > REMEMBERED:
                del self._over[next(iter(self._over))]
