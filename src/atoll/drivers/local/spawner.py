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
from typing import Any

from atoll.drivers.local.abandoned_instances import (
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
        self._starting: dict[int, tuple[int, int, bytearray]] = {}
        """
        Bubblewraps that have not reported their child's pid yet, by the pipe on which they do:
        request number, pid, and what was received.
        """
        self._running: dict[int, dict[str, Any]] = {}
        """Requests of running instances, by the pid of bubblewrap."""
        self._logs: dict[int, int] = {}
        """Logs in memory, by the pid of bubblewrap."""
        try:
            self._owner = os.pidfd_open(owner)
        except ProcessLookupError:
            sys.exit(0)  # The owner has died already.

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
                    self._spawn(json.loads(message))
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

    def _spawn(self, request: dict[str, Any]) -> None:
        try:
            pid, info = self._start(request)
        except OSError as error:
            self._answer(number=request["number"], error=str(error))
            return
        self._starting[info] = (request["number"], pid, bytearray())
        self._running[pid] = request
        self._poll.register(info, select.POLLIN)

    def _start(self, request: dict[str, Any]) -> tuple[int, int]:
        with contextlib.ExitStack() as held:
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            directory = os.open(request["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            # Through the descriptor: the path may be too long for a socket's address.
            place = f"/proc/self/fd/{directory}/link.sock"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)
            listener.bind(place)
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
            pid = os.fork()
            if pid == 0:
                try:
                    become(request, fds, self._data_directory["directory"])
                except BaseException as error:  # noqa: BLE001 - reported to the owner; the process ends here
                    os.write(write, json.dumps({"error": str(error)}).encode())
                finally:
                    os._exit(127)
            if request["log"] is None:
                self._logs[pid] = fcntl.fcntl(log, fcntl.F_DUPFD_CLOEXEC, 0)
            return pid, read

    def _receive(self, fd: int) -> None:
        number, pid, text = self._starting[fd]
        data = os.read(fd, 4096)
        text += data
        try:
            info = json.loads(text)
        except ValueError:
            if data:
                return
            info = {"error": "bubblewrap ended before it started anything"}
        self._poll.unregister(fd)
        os.close(fd)
        del self._starting[fd]
        if "error" in info:
            self._answer(number=number, error=info["error"])
        else:
            if pid in self._running:
                self._running[pid]["child"] = info["child-pid"]
            self._answer(number=number, pid=pid, child=info["child-pid"])

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
            ended.append((self._running.pop(pid), status))
            log, printed = self._logs.pop(pid, None), ""
            if log is not None:
                printed = read_log_tail(log)
                os.close(log)
            self._answer(exited=pid, status=status, printed=printed)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    Spawner(control, int(sys.argv[2]), json.loads(sys.argv[3])).run()
    # Faster than the interpreter's shutdown, which the owner would wait for.
    os._exit(0)
