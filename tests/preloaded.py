"""
Starts `atoll` quickly, as a fork of a process that has imported the application.

A new interpreter needs about a second to import it, and tests start it a thousand times. A fork
runs the same code in its own process, with the given arguments, environment and output. But its
command line and environment in /proc are those of the original process: tests that read them start
a program instead.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO

MESSAGE = 1 << 20
"""Most bytes of a request."""
LONGEST_RUN = 60.0
"""Seconds after which a command is killed."""


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
        """End it; running forks continue."""
        self._socket.close()
        self._process.wait()

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int,
        stderr: int,
        constants: Mapping[str, float] | None = None,
    ) -> Forked:
        """Fork it to run `atoll` with these words, and with other values for its constants."""
        ours, theirs = os.pipe()
        try:
            request = {"words": words, "env": env, "cwd": os.getcwd(), "constants": constants or {}}
            pid = self._ask(request, stdin, theirs, stderr)
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


def start(
    words: Sequence[str],
    env: Mapping[str, str],
    stderr: int,
    *,
    constants: Mapping[str, float] | None = None,
) -> Forked:
    """Start `atoll` with these words and nothing to read; its stdout is piped."""
    with Path(os.devnull).open() as nothing:
        return origin().start(
            words, env, stdin=nothing.fileno(), stderr=stderr, constants=constants
        )


def run(
    *arguments: str, env: Mapping[str, str] | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `atoll` with these words to its end; `env` is added to this environment."""
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as stderr:
        stdin.write(input)
        stdin.seek(0)
        forked = origin().start(
            arguments, {**os.environ, **(env or {})}, stdin=stdin.fileno(), stderr=stderr.fileno()
        )
        limit = threading.Timer(LONGEST_RUN, forked.kill)
        limit.start()
        with forked.stdout as stdout:
            output = stdout.read()
        code = forked.wait()
        limit.cancel()
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, output, stderr.read())


def serve_requests(connection: socket.socket) -> list[str] | None:
    """Answer requests until their sender is gone; in a fork, return the words to run with."""
    while True:
        data, ancillary, _, _ = connection.recvmsg(MESSAGE, socket.CMSG_SPACE(3 * 4))
        if not data:
            return None
        request = json.loads(data)
        if "wait" in request:
            status = os.waitpid(request["wait"], 0)[1]
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        (_, _, descriptors) = ancillary[0]
        streams = array.array("i", descriptors)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, streams)
            return list(request["words"])
        for descriptor in streams:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _become(request: Mapping[str, object], streams: Sequence[int]) -> None:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    env, cwd = request["env"], request["cwd"]
    assert isinstance(env, dict)
    assert isinstance(cwd, str)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    constants = request["constants"]
    assert isinstance(constants, dict)
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        holder = importlib.import_module(module)
        assert hasattr(holder, name), f"no constant is named {path}"
        is_period = isinstance(getattr(holder, name), timedelta)
        setattr(holder, name, timedelta(seconds=value) if is_period else value)


def main() -> None:
    import httptools  # noqa: F401
    import typer
    import uvloop  # noqa: F401

    import atoll.api.rest.documented_routes
    import atoll.app.application
    import atoll.app.replica
    import atoll.sdk.client  # noqa: F401
    from atoll.cli.commands import tree

    command = typer.main.get_command(tree())
    # What a collection marks would be copied in each fork.
    gc.freeze()
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    connection = socket.socket(fileno=int(sys.argv[1]))
    words = serve_requests(connection)
    if words is not None:
        sys.argv[1:] = words
        command(prog_name="atoll")


if __name__ == "__main__":
    main()
