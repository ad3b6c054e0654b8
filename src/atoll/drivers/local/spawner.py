"""
The process that starts instances. It is small, has one thread, and runs as long as its instances
do.

It is a program of its own, and imports the standard library alone. Its forks are cheap however
large the process is that Atoll is embedded in, and `bwrap --die-with-parent`, which is bound to a
thread, is bound to its only one.

When its owner ends, even by SIGKILL, the socket closes or the owner's pidfd becomes readable. The
spawner then ends the ephemeral instances. The others keep running for the next server of the data
directory, and the spawner stays with them. Without a server, it removes the control groups of
instances that end, and kills all instances when the data directory is removed or after `limit`
seconds. Executors end themselves earlier (`executor/unattended.py`); paused or hostile ones do not.

As root it gives each instance a mount namespace, binds the sources of its mounts where an
unprivileged uid can reach them, mounts the workspace's image, and changes to that uid before it
executes bubblewrap (`sandbox_start.py`). The kernel removes all of that with the instance.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from atoll.drivers.local import forked_start
from atoll.drivers.local.orphaned_instances import (
    has_groups,
    identity,
    kill_instance,
    remove_groups,
    unserved,
)
from atoll.drivers.local.sandbox_start import (
    CALLBACK_FD,
    INFO_FD,
    JOURNAL_FDS,
    LISTEN_FD,
    SECCOMP_FD,
    become,
)
from atoll.drivers.shared.bounded_log import create_log, read_log_tail

MAX_MESSAGE = 256 * 1024
"""Bytes of a message on the control socket."""
JOURNAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
START_TIMEOUT = 10.0
"""Seconds that bubblewrap may take to start its child once the owner is gone."""
MAX_FORK_SERVERS = 5
"""How often a fork server is started; after that, bubblewrap starts all instances."""
SERVER_CHECK_INTERVAL = 15.0
"""Seconds between two checks for a server, once the owner has ended."""


def _open_log(path: str | None) -> int:
    """A named pipe that the owner reads, or a log in memory whose end is reported with the exit."""
    if path is None:
        return create_log()
    # Not blocking: the owner must have opened the pipe already.
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


class Starting(NamedTuple):
    """An instance whose start has not been reported yet."""

    request: dict[str, Any]
    pid: int
    """Of bubblewrap, or of the process that starts a fork."""
    text: bytearray
    """What has been received of the report."""
    log: int | None
    """The log in memory, if it has one."""


class Spawner:
    def __init__(self, control: socket.socket, owner: int, data_directory: dict[str, Any]) -> None:
        """
        `data_directory` has the fields of `spawner_client.DataDirectory`. The process `owner` is
        the client.
        """
        self._control = control
        self._data_directory = data_directory
        self._identity = identity(data_directory["directory"])
        self._poll = select.poll()
        self._starting: dict[int, Starting] = {}
        """By the pipe on which the pids are reported."""
        self._running: dict[int, dict[str, Any]] = {}
        """Requests of running instances, by the pid of their main process."""
        self._logs: dict[int, int] = {}
        """Logs in memory, by the same pid."""
        self._ended_early: dict[int, int] = {}
        """Wait statuses of processes that ended before they were reported."""
        self._fork_server = ForkServer()
        try:
            self._owner = os.pidfd_open(owner)
        except ProcessLookupError:
            sys.exit(0)  # The owner has died already.

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # First processes of forked instances become children of the spawner.
        forked_start.become_subreaper()
        for fd in (self._control.fileno(), self._owner, wake_read):
            self._poll.register(fd, select.POLLIN)
        self._serve(wake_read)
        self._outlive(wake_read)

    def _serve(self, wake_read: int) -> None:
        """Start instances until the owner ends."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._owner:
                    return
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif fd == self._control.fileno():
                    try:
                        message = self._control.recv(MAX_MESSAGE)
                    except ConnectionResetError:
                        return
                    if not message:
                        return
                    self._handle(json.loads(message))
                elif fd in self._starting:
                    self._receive(fd)

    def _outlive(self, wake_read: int) -> None:
        """Stay with the instances until they end, or until no server is expected any more."""
        deadline = time.monotonic() + START_TIMEOUT
        while self._starting:
            # Bubblewrap sets --die-with-parent last: until then its child would survive it.
            poll = select.poll()
            for fd in self._starting:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                break
            for fd, _ in ready:
                self._receive(fd)
        for pid, request in self._running.items():
            if request["ephemeral"]:
                kill_instance(pid, request)
        while any(request["ephemeral"] for request in self._running.values()):
            select.select([wake_read], [], [])
            os.read(wake_read, 4096)
            self._reap()
        if not self._running:
            return
        # Signals to an owner in close() that the ephemeral instances have ended.
        self._answer(outlives=True)
        self._fork_server.close()
        self._control.close()
        ended: list[tuple[dict[str, Any], int]] = []
        unserved_since: float | None = None
        while self._running or ended:
            pause = min(SERVER_CHECK_INTERVAL, self._data_directory["limit"] / 4)
            if select.select([wake_read], [], [], pause)[0]:
                os.read(wake_read, 4096)
            ended += self._reap()
            with unserved(self._data_directory["locks"]) as no_server:
                if not no_server:
                    # The server of the data directory cleans up after its instances.
                    unserved_since = None
                    ended.clear()
                    continue
                now = time.monotonic()
                unserved_since = now if unserved_since is None else unserved_since
                removed = identity(self._data_directory["directory"]) != self._identity
                expired = removed or now - unserved_since > self._data_directory["limit"]
                if expired:
                    for pid, request in self._running.items():
                        kill_instance(pid, request)
                ended = [
                    (request, status)
                    for request, status in ended
                    # The groups tell the next server whether memory ran out.
                    if (status and not expired and has_groups(request))
                    or not remove_groups(request)
                ]

    def _answer(self, **answer: Any) -> None:
        if self._control.fileno() < 0:
            return  # The owner has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(answer).encode())

    def _handle(self, request: dict[str, Any]) -> None:
        if "prepare" in request:
            # The first instance reports an error.
            with contextlib.suppress(OSError):
                self._forks(request["prepare"])
        else:
            self._spawn(request)

    def _spawn(self, request: dict[str, Any]) -> None:
        try:
            info, starting = self._start(request)
        except OSError as error:
            self._answer(number=request["number"], error=str(error))
            return
        self._starting[info] = starting
        self._poll.register(info, select.POLLIN)

    def _start(self, request: dict[str, Any]) -> tuple[int, Starting]:
        with contextlib.ExitStack() as held:
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            directory = os.open(request["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            # Through the descriptor: the path may be too long for a socket's address.
            address = f"/proc/self/fd/{directory}/link.sock"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
            listener.listen(64)
            fds = {LISTEN_FD: listener.fileno()}
            if request["seccomp"]:
                fds[SECCOMP_FD] = os.open(request["seccomp"], os.O_RDONLY | os.O_CLOEXEC)
                held.callback(os.close, fds[SECCOMP_FD])
            for number, path in zip(JOURNAL_FDS, request["journal"], strict=False):
                fds[number] = os.open(path, JOURNAL_FLAGS, 0o600)
                held.callback(os.close, fds[number])
                if request["uid"] is not None:
                    os.fchown(fds[number], request["uid"], request["uid"])
            if request["callback"]:
                fds[CALLBACK_FD] = os.open(request["callback"], os.O_RDONLY | os.O_CLOEXEC)
                held.callback(os.close, fds[CALLBACK_FD])
            log = _open_log(request["log"])
            held.callback(os.close, log)
            fds[1] = fds[2] = log
            read, write = os.pipe2(os.O_CLOEXEC)
            fds[INFO_FD] = write
            held.callback(os.close, write)
            forks = self._forks(request)
            spawner = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    if forks is not None:
                        with contextlib.suppress(forked_start.NoForkServer):
                            forked_start.start(request, fds, forks, spawner)
                            os._exit(0)
                    become(request, fds, self._data_directory["mark"])
                except BaseException as error:  # noqa: BLE001 - reported to the owner; the process ends here
                    os.write(write, json.dumps({"error": str(error)}).encode())
                finally:
                    os._exit(127)
            kept = fcntl.fcntl(log, fcntl.F_DUPFD_CLOEXEC, 0) if request["log"] is None else None
            return read, Starting(request, pid, bytearray(), kept)

    def _forks(self, request: dict[str, Any]) -> socket.socket | None:
        """The socket of the fork server of which the instance is to be a fork."""
        known = self._fork_server.problem
        forks = self._fork_server.socket(request)
        if self._fork_server.problem != known:
            self._answer(not_forked=self._fork_server.problem)
        return forks

    def _receive(self, fd: int) -> None:
        starting = self._starting[fd]
        data = os.read(fd, 4096)
        starting.text.extend(data)
        try:
            report = json.loads(starting.text)
        except ValueError:
            if data:
                return
            report = {"error": "it ended before it started anything"}
        self._poll.unregister(fd)
        os.close(fd)
        del self._starting[fd]
        if "error" in report:
            self._answer(number=starting.request["number"], error=report["error"])
            if starting.log is not None:
                os.close(starting.log)
        else:
            self._started(starting, report.get(forked_start.MAIN, starting.pid), report)
        if not self._starting:
            self._ended_early.clear()

    def _started(self, starting: Starting, pid: int, report: dict[str, Any]) -> None:
        starting.request["child"] = report[forked_start.CHILD]
        self._running[pid] = starting.request
        if starting.log is not None:
            self._logs[pid] = starting.log
        self._answer(number=starting.request["number"], pid=pid, child=report[forked_start.CHILD])
        if pid in self._ended_early:
            self._ended(pid, self._ended_early.pop(pid))

    def _reap(self) -> list[tuple[dict[str, Any], int]]:
        """Instances that have ended, with their wait status."""
        ended: list[tuple[dict[str, Any], int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid in self._running:
                ended.append((self._ended(pid, status), status))
            elif not self._fork_server.ended(pid) and self._starting:
                self._ended_early[pid] = status

    def _ended(self, pid: int, status: int) -> dict[str, Any]:
        """Report the end of an instance; returns its request."""
        log, printed = self._logs.pop(pid, None), ""
        if log is not None:
            printed = read_log_tail(log)
            os.close(log)
        self._answer(exited=pid, status=status, printed=printed)
        return self._running.pop(pid)


class ForkServer:
    """The fork server of the spawner, which starts it again if it or its program changes."""

    def __init__(self) -> None:
        self._pid = 0
        self._socket: socket.socket | None = None
        self._started: object = None
        """The description and the program of the last start."""
        self._starts = 0
        self.problem: str | None = None
        """Why it cannot be used."""

    def socket(self, request: dict[str, Any]) -> socket.socket | None:
        """The control socket of the fork server for this start; None if it cannot be used."""
        description, stage = request["fork_server"], request["stage"]
        if description is None:
            return None
        program = os.stat(description["argv"][0])
        wanted = (description, program.st_dev, program.st_ino, program.st_mtime_ns)
        if wanted != self._started:
            self.close()
            self._started, self._starts = wanted, 0
            self.problem = forked_start.problem(request["uid"], stage)
        if self._socket is None and self._starts == MAX_FORK_SERVERS:
            self.problem = f"the fork server has ended {MAX_FORK_SERVERS} times"
        if self._socket is None and self.problem is None:
            self._starts += 1
            self._pid, self._socket = forked_start.start_server(description, stage)
        return self._socket

    def ended(self, pid: int) -> bool:
        """Whether a process that has ended was the fork server."""
        if pid == self._pid:
            self.close()
        return pid == self._pid

    def close(self) -> None:
        """Let it exit. Its forks continue."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    Spawner(control, int(sys.argv[2]), json.loads(sys.argv[3])).run()
    # Faster than the interpreter's shutdown, which the owner would wait for.
    os._exit(0)
