"""
Starts servers of Atoll quickly: forks of one process that has imported the application.

A new interpreter needs about a second to import it, and the tests start a thousand servers. A fork
runs the same code in a process of its own, with the arguments, environment and output that it is
given. But its command line and environment in /proc are those of the process that was forked: tests
that look there start a program instead.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import IO

MESSAGE = 1 << 20
"""Most bytes of a request."""


class Forked:
    """What tests use of `subprocess.Popen`. It is a child of the process that it is a fork of."""

    def __init__(self, origin: Origin, pid: int, stdout: IO[str]) -> None:
        self._origin = origin
        self._descriptor = os.pidfd_open(pid)
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("atoll serve", timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        # Until its exit code is fetched its pid is not given to another process.
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = self._origin.exit_code(self.pid)
        os.close(self._descriptor)


class Origin:
    """The process that is forked, seen from the tests. It ends with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """End it; forks that still run go on."""
        self._socket.close()
        self._process.wait()

    def start(self, arguments: list[str], env: dict[str, str], stderr: int) -> Forked:
        """Fork it to run `atoll` with these arguments."""
        ours, theirs = os.pipe()
        try:
            request = {"arguments": arguments, "env": env, "cwd": os.getcwd()}
            pid = self._ask(request, theirs, stderr)
        finally:
            os.close(theirs)
        return Forked(self, pid, os.fdopen(ours))

    def exit_code(self, pid: int) -> int:
        """Of a fork that has ended; can be asked once."""
        return self._ask({"wait": pid})

    def _ask(self, request: Mapping[str, object], *descriptors: int) -> int:
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with self._lock:
            self._socket.sendmsg([json.dumps(request).encode()], fds if descriptors else [])
            answer = self._socket.recv(64)
        assert answer, f"the preloaded process ended: {self._process.poll()}"
        return int(answer)


@cache
def origin() -> Origin:
    """The one of this process of the tests, which ends with it."""
    started = Origin()
    atexit.register(started.close)
    return started


def serve_requests(connection: socket.socket) -> list[str] | None:
    """Answer requests until their sender is gone; in a fork, return the arguments to run with."""
    while True:
        data, ancillary, _, _ = connection.recvmsg(MESSAGE, socket.CMSG_SPACE(2 * 4))
        if not data:
            return None
        request = json.loads(data)
        if "wait" in request:
            status = os.waitpid(request["wait"], 0)[1]
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        (_, _, descriptors) = ancillary[0]
        stdout, stderr = array.array("i", descriptors)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, stdout, stderr)
            return list(request["arguments"])
        os.close(stdout)
        os.close(stderr)
        connection.send(str(pid).encode())


def _become(request: Mapping[str, object], stdout: int, stderr: int) -> None:
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    env, cwd = request["env"], request["cwd"]
    assert isinstance(env, dict)
    assert isinstance(cwd, str)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def main() -> None:
    import uvloop  # noqa: F401

    import atoll.app  # noqa: F401
    from atoll.cli.root import app

    assert threading.active_count() == 1, "a fork has only the thread that forks"
    connection = socket.socket(fileno=int(sys.argv[1]))
    arguments = serve_requests(connection)
    if arguments is not None:
        sys.argv[1:] = arguments
        app(prog_name="atoll")


if __name__ == "__main__":
    main()
