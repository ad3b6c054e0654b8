"""
Executions as the supervisor sees them: their pipes, their time, their end, and the journal.

A run's output up to the limit and its result stay in the journal until the control plane has
acknowledged them, whatever becomes of the connection meanwhile. A slow or absent reader does not
slow the code: output is taken from the pipes as it comes, and beyond the limit only counted. What
comes in small pieces is gathered, so the journal goes by the bytes and not by the writes.

An id is run once: one whose result was acknowledged is refused. So a control plane that was given
up by the others and comes back cannot run anything a second time.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import time

from . import artifacts, frames, processes
from .child import OUT_OF_MEMORY
from .connection import LAZY_SECONDS, Stream
from .loop import READ, WRITE, Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

PIPE_READ = 262_144
GATHER = 32_768
"""So many bytes of output are sent without waiting for more."""
GATHER_SECONDS = 0.1
"""The longest wait for more, of a run that has written often."""
NO_USAGE = {"cpu": 0.0, "peak": 0, "read": 0, "written": 0}
STRAY_SECONDS = 0.05
STRAY_ROUNDS = 3
STUCK_SECONDS = 0.1
UNTAKEN_SECONDS = 1.0
REMEMBERED = 512
"""How many of the last acknowledged ids are known."""
WATCH_SECONDS = 0.002
"""A run that ends sooner is never watched: what it wrote is read at its end."""


class Pipe:
    """One output of a run: read, kept up to a limit, counted beyond it."""

    def __init__(self, channel: int, fd: int, limit: int) -> None:
        self.channel = channel
        self.fd = fd
        self.limit = limit
        self.size = 0
        self.kept = 0
        self.tail: bytearray | None = None
        """The log's last entry of this channel, as long as it was sent to nobody and may grow."""


class Follower:
    """One who hears of a run, at their own pace."""

    __slots__ = ("announced", "sent", "stream")

    def __init__(self, stream: Stream, sent: int) -> None:
        self.stream = stream
        self.sent = sent
        """Sequence number of the last log entry that went out."""
        self.announced = False


class Run:
    def __init__(self, request: dict[str, Any], number: int) -> None:
        self.id: str = request["id"]
        self.number = number
        self.request = request
        self.pid = 0
        self.parked = True
        """Accepted, and not yet handed to a zygote."""
        self.losses = 0
        """Zygotes that died with it before anybody took it."""
        self.followers: list[Follower] = []
        self.log: list[tuple[int, int, bytes | bytearray]] = []
        self.gathered = 0
        """Bytes that came since output was last sent."""
        self.gathering: Timer | None = None
        self.pipes: list[Pipe] = []
        self.stdin = b""
        self.stdin_fd = -1
        self.started = time.monotonic()
        self.began = artifacts.coarse_now()
        self.reason: str | None = None
        """Why the supervisor ended it, when it did."""
        self.result: dict[str, Any] | None = None
        self.watched = False
        self.watch: Timer | None = None
        self.deadline: Timer | None = None
        self.grace: Timer | None = None
        self.on_end: list[Callable[[], None]] = []
        """Called once when it is being ended, or has ended."""
        self.stop: Callable[[str, float], None] | None = None
        """Ends it where it is hosted, when that is not a child of its own."""


class Runs:
    def __init__(
        self,
        loop: Loop,
        scanner: artifacts.Scanner,
        hash_files: Callable[[list[dict[str, Any]], Callable[[], None]], None],
        see_taken: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._scanner = scanner
        self._hash_files = hash_files
        self._see_taken = see_taken
        """Learns the pids of runs; asked for only when a run lasts, or has to end."""
        self._runs: dict[str, Run] = {}
        self._over: dict[str, None] = {}
        self._expected: dict[str, list[Follower]] = {}
        self._by_pid: dict[int, Run] = {}
        self._count = 0
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.background: dict[int, str] = {}
        """Processes that an execution left running, with its id."""
        self.hosts: dict[int, str] = {}
        """Processes that runs are hosted in, with the id of the context."""

    def active(self) -> list[Run]:
        return [run for run in self._runs.values() if run.result is None]

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def is_over(self, run_id: str) -> bool:
        return run_id in self._over

    def by_number(self, number: int) -> Run | None:
        for run in self._runs.values():
            if run.number == number:
                return run
        return None

    def journal(self) -> list[dict[str, Any]]:
        return [{"id": run.id, "ended": run.result is not None} for run in self._runs.values()]

    # Start

    def make(self, request: dict[str, Any]) -> Run:
        self._count += 1
        return Run(request, self._count)

    def open(self, run: Run) -> list[int]:
        """Make the run's pipes; the ends that go to the process, which the caller closes."""
        request = run.request
        run.started = time.monotonic()
        run.began = artifacts.coarse_now()
        limit = request["output_limit"]
        theirs: list[int] = []
        try:
            text = request.get("stdin")
            if text is None:
                theirs.append(os.dup(self._null))
            else:
                run.stdin = text.encode("utf-8", "surrogateescape")
                read, run.stdin_fd = os.pipe2(os.O_CLOEXEC)
                theirs.append(read)
                os.set_blocking(run.stdin_fd, False)
            for channel in (frames.STDOUT, frames.STDERR, frames.VALUE):
                read, write = os.pipe2(os.O_CLOEXEC)
                theirs.append(write)
                keep = request["return_limit"] + 65_536 if channel == frames.VALUE else limit
                run.pipes.append(Pipe(channel, read, keep))
                os.set_blocking(read, False)
        except BaseException:
            for fd in theirs:
                os.close(fd)
            self.park(run)
            raise
        return theirs

    def enter(self, run: Run, stream: Stream) -> None:
        """Into the journal: from now on it can be found, and its time counts."""
        self._runs[run.id] = run
        run.deadline = self._loop.after(
            run.request["timeout"], lambda: self.end(run, "timeout", 0.0)
        )
        self.attach(run, stream, 0)
        for follower in self._expected.pop(run.id, []):
            self._follow(run, follower)

    def begin(self, run: Run) -> None:
        """The run is on its way to a process."""
        run.parked = False
        run.watch = self._loop.after(WATCH_SECONDS, lambda: self._watch(run))
        self._feed(run)

    def park(self, run: Run) -> None:
        """Nobody took it: close what was opened for it; it may be handed over once more."""
        run.parked = True
        if run.watch is not None:
            run.watch.cancel()
        run.stdin = b""
        self._feed(run)
        for pipe in run.pipes:
            self._close_pipe(run, pipe)
        run.pipes = []
        run.watched = False

    def _cancel_timers(self, run: Run) -> None:
        for timer in (run.watch, run.deadline, run.grace):
            if timer is not None:
                timer.cancel()

    def taken(self, run: Run, pid: int) -> None:
        run.pid = pid
        self._by_pid[pid] = run
        if run.reason is not None:
            processes.kill_tree(pid)

    def attach(self, run: Run, stream: Stream, after: int) -> None:
        """
        Send a run's events to this stream too, beginning behind sequence number `after`.
        """
        self._follow(run, Follower(stream, after))

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

    def _follow(self, run: Run, follower: Follower) -> None:
        run.followers.append(follower)
        follower.stream.on_credit = lambda: self._send_to(run, follower)
        follower.stream.on_reset = lambda: self._detach(run, follower)
        if run.watched or run.result is not None:
            self._announce(run)
        self._send_to(run, follower)

    def _detach(self, run: Run, follower: Follower) -> None:
        if follower in run.followers:
            run.followers.remove(follower)

    def _unstick(self, run: Run) -> None:
        """A child that was stopped before it took the run is replaced by one that takes it."""
        self._see_taken()
        if run.pid or run.parked or run.result is not None:
            return
        for zygote in self.own:
            for pid in processes.children_of(zygote):
                child = processes.read(pid)
                if child is not None and child.state in "Tt" and not self._is_known(pid):
                    processes.send(pid, signal.SIGKILL)
        self._loop.after(STUCK_SECONDS, lambda: self._unstick(run))

    # Output

    def _watch(self, run: Run) -> None:
        run.watched = True
        self._see_taken()
        if not run.pid:
            self._loop.after(STUCK_SECONDS, lambda: self._unstick(run))
        for pipe in run.pipes:
            if pipe.fd >= 0:
                self._loop.add(pipe.fd, READ, self._reader(run, pipe))
        if run.stdin_fd >= 0:
            self._loop.add(run.stdin_fd, WRITE, lambda mask: self._feed(run))
        self._announce(run)

    def _announce(self, run: Run) -> None:
        for follower in run.followers:
            if not follower.announced:
                follower.announced = True
                follower.stream.event({"event": "started"})

    def _feed(self, run: Run) -> None:
        """Write what the pipe takes of stdin; close it at the end, or when nobody reads."""
        try:
            while run.stdin:
                written = os.write(run.stdin_fd, run.stdin[:65_536])
                run.stdin = run.stdin[written:]
        except BlockingIOError:
            return
        except OSError:
            run.stdin = b""
        if run.stdin_fd >= 0:
            if run.watched:
                self._loop.remove(run.stdin_fd)
            os.close(run.stdin_fd)
            run.stdin_fd = -1

    def _reader(self, run: Run, pipe: Pipe) -> Callable[[int], None]:
        def ready(mask: int) -> None:
            self._read(run, pipe)

        return ready

    def _read(self, run: Run, pipe: Pipe) -> bool:
        """Take one piece from a pipe; whether there may be more."""
        try:
            data = os.read(pipe.fd, PIPE_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_pipe(run, pipe)
            return False
        pipe.size += len(data)
        room = pipe.limit - pipe.kept
        if room > 0 and run.result is None:
            self._keep(run, pipe, data[:room])
        return True

    def take_output(self, run: Run) -> None:
        """Read what is there already."""
        for pipe in run.pipes:
            # A process left running may write on and on; nobody is kept waiting for it.
            rounds = 0
            while pipe.fd >= 0 and rounds < 64 and self._read(run, pipe):
                rounds += 1

    def _keep(self, run: Run, pipe: Pipe, data: bytes) -> None:
        """Into the log, and to the stream: soon, with what follows it, or at once if it is much."""
        pipe.kept += len(data)
        run.gathered += len(data)
        while data:
            if pipe.tail is None or len(pipe.tail) >= frames.CHUNK:
                pipe.tail = bytearray()
                run.log.append((len(run.log) + 1, pipe.channel, pipe.tail))
            room = frames.CHUNK - len(pipe.tail)
            pipe.tail += data[:room]
            data = data[room:]
        if run.gathered >= GATHER:
            self._send(run)
        elif run.gathering is None and run.followers:
            # The longer the log, the longer the wait: an entry costs more than its bytes.
            seconds = min(LAZY_SECONDS * (1 + len(run.log) / 256), GATHER_SECONDS)
            run.gathering = self._loop.after(seconds, lambda: self._send(run))

    def add_entry(self, run: Run, channel: int, payload: bytes) -> None:
        """A whole entry of the log, sent at once."""
        if run.result is None:
            for pipe in run.pipes:
                pipe.tail = None
            run.log.append((len(run.log) + 1, channel, payload))
            self._send(run)

    def _send(self, run: Run) -> None:
        run.gathered = 0
        if run.gathering is not None:
            run.gathering.cancel()
            run.gathering = None
        for follower in run.followers[:]:
            self._send_to(run, follower)

    def _send_to(self, run: Run, follower: Follower) -> None:
        stream = follower.stream
        while follower.sent < len(run.log):
            sequence, channel, data = run.log[follower.sent]
            # Of an entry larger than any credit, half a window is enough.
            if stream.credit < min(len(data) + frames.OUTPUT_HEADER.size, frames.WINDOW // 2):
                return
            self._announce(run)
            if isinstance(data, bytearray):
                # From now on somebody may ask for what follows it: it stays as it is.
                for pipe in run.pipes:
                    if pipe.tail is data:
                        pipe.tail = None
                data = bytes(data)
                run.log[follower.sent] = (sequence, channel, data)
            stream.send(frames.OUTPUT, frames.OUTPUT_HEADER.pack(sequence, channel) + data)
            follower.sent = sequence
        if run.result is not None and follower in run.followers:
            run.followers.remove(follower)
            stream.end(run.result)

    # End

    def end(self, run: Run, reason: str, grace: float) -> None:
        """End all of a run, at once or after asking it to; the first reason stays."""
        if run.result is not None or run.reason is not None:
            return
        self._see_taken()
        run.reason = reason
        if run.stop is not None:
            run.stop(reason, grace)
            return
        if run.parked:
            self.never_began(run)
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
        run.result = self._result(run, signal.SIGKILL, dict(NO_USAGE))
        self._settle(run)

    def exited(self, pid: int, status: int, usage: dict[str, float]) -> None:
        """The leader of a run is gone: read what is left, and make the result."""
        run = self._by_pid.pop(pid, None)
        if run is not None:
            self._conclude(run, status, usage)

    def conclude(self, run: Run, status: int, usage: dict[str, float]) -> None:
        """A hosted run is over: wait status as of waitpid."""
        if run.result is None:
            self._conclude(run, status, usage)

    def _conclude(self, run: Run, status: int, usage: dict[str, float]) -> None:
        result = self._result(run, status, usage)
        self._cancel_timers(run)
        self.take_output(run)
        if run.reason is None:
            self._leave_background(run)
        else:
            self._end_strays(0)
        files, cut = self._scanner.changed_since(run.began, run.request["artifact_limit"])
        if run.reason is None and "DATA" in run.request["limits"] and status == OUT_OF_MEMORY << 8:
            run.reason = "memory"
        result["reason"] = run.reason
        result["sizes"] = {str(pipe.channel): pipe.size for pipe in run.pipes}
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
            "usage": usage,
            "sizes": {},
            "artifacts": [],
            "artifacts_cut": False,
        }

    def _settle(self, run: Run) -> None:
        self._close(run)
        self._announce(run)
        self._send(run)

    def _strays(self) -> list[int]:
        """Children of PID 1 that no run is known to have left."""
        return [
            pid
            for pid in processes.children_of(1)
            if pid not in self.background and pid not in self.own and not self._is_known(pid)
        ]

    def _is_known(self, pid: int) -> bool:
        return pid in self._by_pid or pid in self.hosts

    def end_strays(self) -> None:
        """End what a process left that was not meant to outlive it."""
        self._end_strays(0)

    def _leave_background(self, run: Run) -> None:
        for pid in self._strays():
            self.background[pid] = run.id

    def _end_strays(self, rounds: int) -> None:
        """What got away when its run was ended ends too, if need be with everything else."""
        strays = self._strays()
        if not strays:
            return
        if rounds < STRAY_ROUNDS:
            processes.kill_tree(*strays)
        else:
            processes.kill_everything()
        self._loop.after(STRAY_SECONDS, lambda: self._end_strays(rounds + 1))

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
            self._conclude(run, signal.SIGKILL, dict(NO_USAGE))
        elif run.reason is None:
            processes.kill_tree(pid)

    def acknowledge(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.result is not None:
            del self._runs[run_id]
            self._over[run_id] = None
            if len(self._over) > REMEMBERED:
                del self._over[next(iter(self._over))]

    def _close(self, run: Run) -> None:
        """Close what the run's end leaves open; a pipe that somebody still writes to is drained."""
        for pipe in run.pipes:
            if pipe.fd >= 0:
                if pipe.channel != frames.VALUE and (self.background or run.stop is not None):
                    if not run.watched:
                        self._loop.add(pipe.fd, READ, self._reader(run, pipe))
                else:
                    self._close_pipe(run, pipe)
        run.watched = run.watched or bool(self.background) or run.stop is not None
        run.stdin = b""
        self._feed(run)

    def _close_pipe(self, run: Run, pipe: Pipe) -> None:
        self._loop.remove(pipe.fd)
        os.close(pipe.fd)
        pipe.fd = -1
