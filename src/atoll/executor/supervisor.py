"""
PID 1 of the instance.

It holds the link and runs no user code. It cannot be traced or read by its peers (not dumpable),
its descriptors are closed to them, and the kernel keeps signals of the namespace from it. When it
ends, the kernel ends everything in the namespace.
"""

from __future__ import annotations

import _operator
import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import struct
import sys

from ..protocol import frames, minijson
from . import processes, syscalls
from .callbacks import Reports
from .connection import Connection, Refusal, Stream
from .contexts import Contexts
from .event_loop import READ, Loop
from .files import artifacts
from .files.paths import ROOT, FileError
from .files.requests import FileRequests
from .files.staging import Staging
from .files.workspace import Workspace
from .freeze import Standstill
from .interpreter import zygote
from .output_tail import Tail
from .runs.conversations import Conversations
from .runs.journal import Journal
from .runs.limits import Watch
from .runs.requests import RunRequests
from .runs.runs import Run, Runs
from .unattended import Unattended
from .workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SO_PASSCRED, SO_PEERCRED = 16, 17
SCM_RIGHTS, SCM_CREDENTIALS = 1, 2
CREDENTIALS = struct.Struct("3i")
MOST_STRANGERS = 16
"""Connections at a time of which it is not known yet whose they are."""
MOST_CONFIG = 1 << 20
JOURNAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
ZYGOTE_STARTS = 5
UNPARK_SECONDS = 0.05
STUCK_SECONDS = 0.1
MAX_LOSSES = 5
"""How many zygotes a run may lose before it has begun."""
TERMINATED = 143
READY = b"ready\n"
LEAVE_SECONDS = 8.0
"""The longest that an executor which was told to end waits for what it ran."""
CHANGING = frozenset({"write", "mkdir", "move", "remove", "chmod", "populate"})
"""Requests by which PID 1 itself changes files, whoever stands still."""
LOOK_SECONDS = 0.02
SOON_SECONDS = 0.002


class Supervisor:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._loop = Loop()
        self._root: str = config.get("root", ROOT)
        self._workspace = Workspace(self._root)
        self._scanner = artifacts.Scanner(self._root)
        self._staging = Staging(self._loop, self._root)
        self._reports = Reports(self._loop, config.get("callback"))
        self._reports.on_process = self._note_own
        self._runs = Runs(
            self._loop,
            self._scanner,
            self._staging,
            self._hash_files,
            self._see_taken,
            self._watch_untaken,
            Journal(config.get("journal_fds", ())),
            self._reports,
        )
        self._conversations = Conversations(self._loop, self._runs)
        self._watch = Watch(self._loop, self._runs, self._root)
        self._contexts = Contexts(
            self._loop,
            self._runs,
            self._submit,
            self._see_taken,
            self._settle_want,
            self._watch.limit,
        )
        self._workers = Workers(self._loop, self._workspace.root)
        self._workers.on_process = self._note_own
        self._standstill = Standstill(self._loop, lambda: frozenset((self._reports.pid,)))
        requests = FileRequests(self._workspace, self._scanner, self._watch, self._workers)
        requests.on_change = self._standstill.disturb
        self._connections: list[Connection] = []
        # An instance that ends with its owner is attended as long as that lives.
        limit = config.get("unattended")
        self._unattended = None if limit is None else Unattended(self._loop, limit, self._abandon)
        self._strangers: dict[int, _socket.socket] = {}
        self._peer: int | None = config.get("peer")
        """The user whose processes in here may connect; without, only those from outside may."""
        self._zygote_starts = 0
        self._releases: list[Stream] = []
        self._leaving = False
        self._quieted = False
        self._edition = 0
        """The latest edition of the session that a control plane has told of."""
        self._operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "run": self._run,
            "release": self._release,
            "shutdown": self._shutdown,
            **RunRequests(self._runs, self._see_taken).operations,
            **self._conversations.operations,
            **requests.operations,
            **self._contexts.operations,
            "context_create": self._context_create,
            "edition": self._note_edition,
            "scan": self._port,
            "collect": self._port,
            "populate": self._port,
            "quiet": self._quiet,
            "detach": self._detach,
        }
        if self._unattended is not None:
            self._operations["unattended"] = self._unattended.configure

    def _port(self, stream: Stream, request: dict[str, Any]) -> None:
        from .files.transfer import Porter  # Most instances that are waiting never need it.

        porter = Porter(self._loop, self._workspace, self._standstill)
        work = {"scan": porter.scan, "collect": porter.collect, "populate": porter.populate}
        work[request["op"]](stream, request)

    def _quiet(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        End every other process of the namespace, at once: nothing of a user's runs from here on.
        What ran is told as ended by that, and not by a signal of its own.
        """
        self._quieted = True
        self._end_runs()
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass  # There is none.
        stream.end({})
        self._dismiss(stream.connection, int(LEAVE_SECONDS / SOON_SECONDS))

    def _detach(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        Close all other connections, so that those who hold them notice that they are to look anew.
        Runs go on, and what they say stays in the journal.
        """
        for connection in list(self._connections):
            if connection is not stream.connection:
                connection.close()
        stream.end({})

    def _dismiss(self, kept: Connection, looks: int) -> None:
        """Close all other connections, when they were told how what ran has ended."""
        told = all(connection.flushed for connection in self._connections)
        if looks > 0 and not (told and not self._runs.active()):
            self._loop.after(SOON_SECONDS, lambda: self._dismiss(kept, looks - 1))
            return
        for connection in list(self._connections):
            if connection is not kept:
                connection.close()

    def run(self, listener: _socket.socket) -> None:
        if "inside" in self._config:
            # Before the zygote, whose modules are the template's: nobody else may have the name.
            self._conversations.listen(self._config["inside"])
        self._start_zygote()
        # After the fork: what it reads is not in the zygote's memory.
        self._runs.recall()
        self._staging.clear()
        self._catch_children()
        self._catch_end()
        if self._unattended is not None:
            self._unattended.disconnected()
        listener.setblocking(False)
        self._loop.add(listener.fileno(), READ, lambda mask: self._accept(listener))
        ready = self._config.get("ready_fd")
        if ready is not None:
            os.write(ready, READY)
            os.close(ready)
        owner = self._config.get("owner_fd")
        if owner is not None:
            self._loop.add(owner, READ, lambda mask: self._owner_said(owner))
        self._loop.run()

    @staticmethod
    def _owner_said(owner: int) -> None:
        if not os.read(owner, 4096):
            os._exit(0)  # It is gone, and nobody else may have this instance.

    # Connections

    def _accept(self, listener: _socket.socket) -> None:
        try:
            fd, _ = listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return  # Gone before it was taken.
        socket = _socket.socket(fileno=fd)
        socket.setblocking(False)
        os.set_inheritable(fd, False)
        if self._peer is not None:
            self._ask_who(socket)
        elif os.getpid() == 1 and CREDENTIALS.unpack(_peer_of(socket))[0] != 0:
            # A peer that this namespace can name is one of its own processes.
            socket.close()
        else:
            self._admit(socket)

    def _ask_who(self, socket: _socket.socket) -> None:
        """
        The first message has to bear its sender's credentials, which the kernel has checked. Not
        every kernel tells them of a connection: gVisor tells our own.
        """
        pid, uid, _ = CREDENTIALS.unpack(_peer_of(socket))
        if uid != self._peer and pid != os.getpid():
            socket.close()
            return
        socket.setsockopt(_socket.SOL_SOCKET, SO_PASSCRED, 1)
        while len(self._strangers) >= MOST_STRANGERS:
            self._dismiss_stranger(next(iter(self._strangers))).close()
        self._strangers[socket.fileno()] = socket
        self._loop.add(socket.fileno(), READ, lambda mask: self._told_who(socket))

    def _told_who(self, socket: _socket.socket) -> None:
        self._dismiss_stranger(socket.fileno())
        told = [-1]
        try:
            _, notes, _, _ = socket.recvmsg(1, _socket.CMSG_SPACE(CREDENTIALS.size))
            for _, kind, data in notes:
                if kind == SCM_CREDENTIALS:
                    told.append(CREDENTIALS.unpack(data)[1])
                elif kind == SCM_RIGHTS:
                    for (fd,) in struct.iter_unpack("i", data):
                        os.close(fd)
        except (OSError, struct.error):
            pass  # It is gone, or nobody that we know.
        if told[-1] != self._peer:
            socket.close()
            return
        socket.setsockopt(_socket.SOL_SOCKET, SO_PASSCRED, 0)
        self._admit(socket)

    def _dismiss_stranger(self, fd: int) -> _socket.socket:
        self._loop.remove(fd)
        return self._strangers.pop(fd)

    def _admit(self, socket: _socket.socket) -> None:
        self._connections.append(
            Connection(self._loop, socket, self._hello, self._request, self._closed)
        )

    def _closed(self, connection: Connection) -> None:
        self._connections.remove(connection)
        attended = any(other.greeted for other in self._connections)
        if connection.greeted and not attended and self._unattended is not None:
            self._unattended.disconnected()

    def _hello(self, connection: Connection, hello: dict[str, Any]) -> bool:
        """Whether its requests are to be heard."""
        token = self._config.get("token")
        if token is not None and not same(token, hello.get("token")):
            value = {"code": "unauthenticated", "message": "this is not the instance's token"}
            connection.write(frames.encode_json(0, frames.ERROR, value))
            return False
        if frames.VERSION not in hello.get("versions", ()):
            message = "this executor speaks version %d" % frames.VERSION
            value = {"code": "version_mismatch", "message": message}
            connection.write(frames.encode_json(0, frames.ERROR, value))
            return False
        greeting = {
            "version": frames.VERSION,
            "features": frames.FEATURES,
            "python": sys.version.split()[0],
            "zygote": self._zygote_pid,
            "runs": self._runs.journal(),
        }
        connection.write(frames.encode_json(0, frames.HELLO, greeting))
        if self._unattended is not None:
            self._unattended.connected()
        return True

    def _request(self, stream: Stream, request: dict[str, Any]) -> None:
        operation = self._operations.get(request.get("op", ""))
        try:
            if operation is None:
                raise Refusal(
                    "unsupported", "this executor has no operation %r" % request.get("op")
                )
            if request["op"] in CHANGING:
                self._standstill.disturb()
            operation(stream, request)
        except (Refusal, FileError) as error:
            stream.error(error.code, str(error))
        except OSError as error:
            stream.error("executor_error", str(error))
        except ImportError as error:
            # Of an interpreter that was built with less than ours.
            stream.error("unsupported", str(error))
        except (KeyError, TypeError, ValueError) as error:
            stream.error("bad_request", "%s: %s" % (type(error).__name__, error))

    # The zygote and PID 1's other children

    def _start_zygote(self) -> None:
        if self._zygote_starts >= ZYGOTE_STARTS:
            # It dies each time before it is ready; an instance that cannot run anything ends.
            self._explain_end(self._output.last)
            os._exit(70)
        self._zygote_starts += 1
        self._zygote_ready = False
        self._released = False
        self._preload_failed: dict[str, str] = {}
        self._want = 1
        started = zygote.start(
            self._config.get("preload", []),
            bool(self._config.get("hooks", True)),
            self._config.get("packages", ""),
            int(self._config.get("oom_score", 0)),
        )
        self._zygote_pid, self._control, self._jobs = started.pid, started.control, started.jobs
        self._output: Tail = Tail(self._loop, started.output)
        self._note_own()
        event = {"event": "zygote", "pid": self._zygote_pid}
        for connection in self._connections:
            connection.write(frames.encode_json(0, frames.EVENT, event))
        self._loop.add(self._control.fileno(), READ, lambda mask: self._from_zygote())

    @staticmethod
    def _explain_end(printed: bytes) -> None:
        try:
            os.write(2, printed + b"atoll: the zygote does not start\n")
        except OSError:
            pass  # The control plane that reads it is gone.

    def _note_own(self) -> None:
        self._runs.own = frozenset((self._zygote_pid, self._reports.pid)) - {0} | self._workers.pids

    def _from_zygote(self) -> None:
        while True:
            try:
                message = self._control.recv(zygote.MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._zygote_lost()
                return
            if message[:1] == zygote.READY:
                self._zygote_ready = True
                self._zygote_starts = 0
                self._reports.ready()
                self._preload_failed = minijson.loads(message[1:])
                releases, self._releases = self._releases, []
                for stream in releases:
                    self._released_now(stream)
            else:
                pid, status, user, system_time, peak, read, written = zygote.EXIT.unpack(
                    message[1:]
                )
                usage = {
                    "cpu": (user + system_time) / 1e6,
                    "peak": peak * 1024,
                    "read": read,
                    "written": written,
                }
                self._see_taken()
                self._runs.exited(pid, status, usage)
                self._contexts.exited(pid, status, usage)
                self._settle_want()

    def _zygote_lost(self) -> None:
        """
        Killed by user code, or by the kernel for memory: its runs end, a new one takes its place.
        """
        self._note_taken(zygote.recall_jobs(self._jobs))
        releases, self._releases = self._releases, []
        for stream in releases:
            # Of the old one: the new one is not in its control group yet.
            stream.error("zygote_replaced", "zygote %d is gone" % self._zygote_pid)
        self._loop.remove(self._control.fileno())
        self._control.close()
        self._jobs.close()
        self._output.close()
        self._contexts.zygote_lost()
        for run in self._runs.active():
            if run.parked or run.stop is not None:
                continue
            if run.pid:
                self._runs.crashed(run.pid)
            elif run.reason is not None or run.losses >= MAX_LOSSES:
                self._runs.never_began(run)
            else:
                # Nobody took it, so it has not begun.
                run.losses += 1
                self._runs.park(run)
        self._start_zygote()

    def _see_taken(self) -> None:
        """
        Learn which process took which run. Not waited for: needed only when a run lasts or ends.
        """
        self._note_taken(zygote.taken_jobs(self._jobs))

    def _note_taken(self, taken: list[tuple[int, int]]) -> None:
        for number, pid in taken:
            run = self._runs.by_number(number)
            if run is not None:
                self._runs.taken(run, pid)
            else:
                self._contexts.taken(number, pid, self._zygote_pid)

    def _watch_untaken(self, run: Run) -> None:
        """
        Watch a run until a child of the zygote takes it: replace children that user code has
        stopped, and hand the run over again when the child that received it has died.
        """
        number = run.number

        def look() -> None:
            children = [processes.read(pid) for pid in processes.children_of(self._zygote_pid)]
            # After their states: one that is stopped has announced by now what it received.
            self._see_taken()
            if run.number != number or run.pid or run.parked or run.over:
                return
            if run.pipes.abandoned:
                # It was received and never announced, so it has not begun.
                self._hand_over_again(run)
                return
            for child in children:
                if child is None or self._runs.is_leader(child.pid):
                    continue
                if child.state in "Tt":
                    processes.send(child.pid, signal.SIGKILL)
            self._loop.after(STUCK_SECONDS, look)

        self._loop.after(STUCK_SECONDS, look)

    def _hand_over_again(self, run: Run) -> None:
        if run.reason is not None:
            self._runs.never_began(run)
        else:
            self._runs.park(run)
            self._unpark()

    def _settle_want(self) -> None:
        runs = [run for run in self._runs.active() if run.stop is None]
        want = max(1, len(runs)) + self._contexts.children(self._zygote_pid)
        if want != self._want and self._released:
            self._want = want
            try:
                self._control.send(zygote.WANT + b"%d" % want)
            except OSError:
                pass  # It is gone, which the loop is about to see.

    def _catch_children(self) -> None:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Written to by none but the handler, so a full pipe loses nothing: one byte is enough.
        self._loop.add(read, READ, lambda mask: self._reap(read))

    def _reap(self, wake: int) -> None:
        os.read(wake, 4096)
        self._see_taken()
        self._free_zygote()
        while True:
            try:
                pid, status, usage = os.wait3(os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._runs.background.pop(pid, None)
            self._workers.exited(pid)
            used = {
                "cpu": usage.ru_utime + usage.ru_stime,
                "peak": usage.ru_maxrss * 1024,
                "read": usage.ru_inblock * zygote.BLOCK,
                "written": usage.ru_oublock * zygote.BLOCK,
            }
            self._runs.exited(pid, status, used)
            self._contexts.exited(pid, status, used)

    def _free_zygote(self) -> None:
        """User code can stop the zygote, which then sees no end of any run: it is replaced."""
        if self._standstill.wanted:
            return
        try:
            stopped = os.waitid(os.P_PID, self._zygote_pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return
        if stopped is not None:
            processes.send(self._zygote_pid, signal.SIGKILL)

    # Runs

    def _run(self, stream: Stream, request: dict[str, Any]) -> None:
        known = self._runs.get(request["id"])
        if known is not None:
            self._runs.attach(known, stream, 0)
            return
        if self._runs.is_over(request["id"]):
            raise Refusal("run_is_over", "run %s has ended and was acknowledged" % request["id"])
        if self._leaving or self._quieted:
            raise Refusal("leaving", "this executor was told to end")
        self._check_edition(request)
        active, capacity = self._runs.active(), request.get("capacity")
        if capacity and len(active) >= capacity:
            # Of a control plane that was lost: who tells us to run this one cannot know of it.
            raise Refusal("busy", active[0].id)
        self._watch.limit(request["watch"])
        context = self._contexts.check(request["context"]) if request.get("context") else None
        request["workspace"] = self._root
        run = self._runs.make(request)
        if context is not None:
            self._contexts.begin(context, run)
        elif self._released:
            self._hand_over(run)
        self._runs.enter(run, stream)
        self._settle_want()

    def _check_edition(self, request: dict[str, Any]) -> None:
        """Refuse what was made up from an older edition of the session than others know."""
        edition = int(request.get("edition", self._edition))
        if edition < self._edition:
            raise Refusal("stale", "the session is at edition %d" % self._edition)
        self._edition = edition

    def _note_edition(self, stream: Stream, request: dict[str, Any]) -> None:
        edition = int(request["edition"])
        self._edition = edition if request.get("reset") else max(self._edition, edition)
        stream.end({})

    def _context_create(self, stream: Stream, request: dict[str, Any]) -> None:
        self._check_edition(request)
        self._contexts.operations["context_create"](stream, request)

    def _hand_over(self, run: Run) -> None:
        theirs = self._runs.open(run)
        try:
            # Before all else: a process is waiting for it.
            zygote.send_job(self._jobs, run.number, run.request, theirs)
        except OSError as error:
            self._runs.park(run)
            raise Refusal("executor_busy", "the run could not be handed over: %s" % error) from None
        finally:
            for fd in theirs:
                os.close(fd)
        self._runs.begin(run)

    def _submit(self, number: int, job: dict[str, Any], descriptors: list[int]) -> bool:
        """Hand over what is not a run; False when nobody is there to take it."""
        if self._released:
            zygote.send_job(self._jobs, number, job, descriptors)
        return self._released

    def _unpark(self) -> None:
        """Hand over the runs that came before the zygote was ready for them."""
        for run in self._runs.active():
            if run.parked and self._released:
                try:
                    self._hand_over(run)
                except (Refusal, OSError):
                    # More than the socket takes at a time.
                    self._loop.after(UNPARK_SECONDS, self._unpark)
                    break
        self._contexts.unpark()
        self._settle_want()

    def _release(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        The zygote is in its control group: it may have children. Answered when it is ready to.

        It names the zygote it is about, which may have been replaced meanwhile.
        """
        if request["zygote"] != self._zygote_pid:
            raise Refusal("zygote_replaced", "zygote %s is gone" % request["zygote"])
        if self._zygote_ready:
            self._released_now(stream)
        else:
            self._releases.append(stream)

    def _released_now(self, stream: Stream) -> None:
        if not self._released:
            self._released = True
            self._want = 0
            self._unpark()
        stream.end({"preload_failed": self._preload_failed})

    def _hash_files(self, listed: list[dict[str, Any]], done: Callable[[], None]) -> None:
        if sum(item["size"] for item in listed) <= 262_144:
            artifacts.hash_files(self._workspace, listed)
            done()
            return
        # Large files: beside the loop. The pipe brings the end of it back into the loop.
        read, write = os.pipe2(os.O_CLOEXEC)

        def work() -> None:
            try:
                artifacts.hash_files(self._workspace, listed)
            finally:
                os.close(write)

        def finished(mask: int) -> None:
            self._loop.remove(read)
            os.close(read)
            done()

        self._loop.add(read, READ, finished)
        import threading

        threading.Thread(target=work, daemon=True).start()

    # The instance

    def _shutdown(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({})
        self._leave(0)

    def _catch_end(self) -> None:
        """
        SIGTERM of whoever runs this machine; from inside, where it is only user code's wish, it
        does nothing.
        """
        # With all others but the one that has a handler: gVisor does not keep them from PID 1.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
        told = syscalls.signal_descriptor(signal.SIGTERM)

        def terminated(mask: int) -> None:
            if syscalls.is_from_outside(os.read(told, 128)) or os.getpid() != 1:
                self._leave(TERMINATED)

        self._loop.add(told, READ, terminated)

    def _abandon(self) -> None:
        self._leave(0)

    def _leave(self, status: int) -> None:
        """What runs ends as crashed, which those who follow it are told; then this process ends."""
        if self._leaving:
            return
        self._leaving = True
        self._end_runs()
        self._leave_when_told(status, int(LEAVE_SECONDS / LOOK_SECONDS))

    def _end_runs(self) -> None:
        self._conversations.refuse_all("shutdown")
        for run in self._runs.active():
            self._runs.end(run, "shutdown", 0.0)

    def _leave_when_told(self, status: int, looks: int) -> None:
        told = all(connection.flushed for connection in self._connections)
        if looks <= 0 or (told and not self._runs.active()):
            os._exit(status)
        self._loop.after(LOOK_SECONDS, lambda: self._leave_when_told(status, looks - 1))


def _peer_of(socket: _socket.socket) -> bytes:
    found: bytes = socket.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, CREDENTIALS.size)
    return found


def same(token: str, told: object) -> bool:
    """Compared in a time that does not tell how much of it is right."""
    return isinstance(told, str) and _operator._compare_digest(token.encode(), told.encode())


def main() -> None:
    text = sys.argv[1].encode()
    config = _told_by_stdin() if text == b"-" else minijson.loads(text)
    # The kernel keeps from PID 1 only what it has no handler for, and Python has one for this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if config.get("seccomp"):
        syscalls.filter_calls(bytes.fromhex(config["seccomp"]))
    zygote.warm(bool(config.get("hooks", True)))
    syscalls.set_dumpable(False)
    syscalls.set_name("atoll")
    if "journal" in config:
        config["journal_fds"] = [os.open(path, JOURNAL_FLAGS, 0o600) for path in config["journal"]]
    listener = _listener(config)
    ours = [listener.fileno(), *config.get("journal_fds", ())]
    if config.get("callback"):
        ours.append(config["callback"]["fd"])
    for fd in ours:
        os.set_inheritable(fd, False)
    Supervisor(config).run(listener)


def _told_by_stdin() -> dict[str, Any]:
    """
    What PID 1 is to know and no command line is to show: the first line. The standard streams are
    those of whoever started this; no child is to have them, but for the log.
    """
    text = b""
    while not text.endswith(b"\n") and len(text) < MOST_CONFIG:
        piece = os.read(0, 65_536)
        if not piece:
            raise ValueError("nobody said what to do")
        text += piece
    config: dict[str, Any] = minijson.loads(text)
    if config.get("ephemeral"):
        config["owner_fd"] = os.dup(0)
    config["ready_fd"] = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    return config


def _listener(config: dict[str, Any]) -> _socket.socket:
    if "listen_fd" in config:
        return _socket.socket(fileno=config["listen_fd"])
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(config["listen"])
    listener.listen(64)
    return listener
