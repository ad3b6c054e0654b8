"""
Starts instances as forks of the fork server (`executor/fork_server.py`), in processes of the
spawner. Standard library alone.

The spawner starts the fork server in a mount namespace of its own, with the read-only files of an
instance and nothing else of the host: the interpreter's files are mapped into every instance, and
none can be written through /proc/self/exe. For each instance a fork of the spawner, the starter,
talks to a fork of the fork server, and makes the sandbox's file system in its namespaces. What the
starter knows, such as paths of the host, never gets into the memory of an instance.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.drivers.local import sandbox_mounts
from atoll.drivers.local.sandbox_start import (
    INFO_FD,
    SECCOMP_FD,
    become_user,
    join_groups,
    limit,
    prepare_mounts,
    use_descriptors,
)
from atoll.drivers.shared.mount_syscalls import (
    MS_NODEV,
    MS_NOSUID,
    NO_SETUID,
    READ_ONLY,
    check,
    libc,
    mount,
    own_mounts,
    restrict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL_FD = 3
DONE, ERROR = b"done", b"!"
"""What forks of the fork server answer."""
MAX_ANSWER = 4096
MAIN, CHILD = "main-pid", "child-pid"
"""In the report of a start: the process whose end is the instance's, and its PID 1."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_NEW_USERS = 0x1000_0000
NAMESPACES = 0x0002_0000 | 0x1000_0000 | 0x0400_0000 | 0x2000_0000
"""Those of mounts, users, the host name and processes."""


class NoForkServer(Exception):
    """The fork server has ended, or does not work on this machine."""


def become_subreaper() -> None:
    """Orphaned descendants become children of this process."""
    check(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "becoming a subreaper")


class Task:
    """Something that a fork of this process does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._report, report = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                work()
                os.write(report, DONE)
            except BaseException as error:  # noqa: BLE001 - reported; the process ends here
                os.write(report, str(error).encode())
            finally:
                os._exit(0)
        os.close(report)

    def wait(self) -> None:
        """Raises OSError with the reason if it failed."""
        with open(self._report, "rb") as file:
            text = file.read()
        os.waitpid(self._pid, 0)
        if text != DONE:
            raise OSError(text.decode(errors="replace") or "the process ended early")


def problem(uid: int, stage: str) -> str | None:
    """
    Why sandboxes of forks cannot be made on this machine; None if they can. No other process may
    have the uid: it could trace the one that tries.
    """
    try:
        Task(lambda: _try_sandbox(uid, stage)).wait()
    except OSError as error:
        return str(error)
    return None


def _try_sandbox(uid: int, stage: str) -> None:
    become_user(uid)
    # Its files in /proc belong to root otherwise.
    check(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "becoming dumpable")
    check(libc.unshare(_NEW_USERS), "making a user namespace")
    mapping = f"0 {uid} 1"
    for name, text in (("setgroups", "deny"), ("uid_map", mapping), ("gid_map", mapping)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    own_mounts()
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV)
    restrict(stage, READ_ONLY, recursive=True)


def start_server(server: dict[str, Any], stage: str) -> tuple[int, socket.socket]:
    """Start the fork server; returns its pid and its control socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            _become_server(server, stage, theirs.fileno())
        finally:
            os._exit(127)
    theirs.close()
    return pid, ours


def _become_server(server: dict[str, Any], stage: str, control: int) -> NoReturn:
    own_mounts()
    sandbox_mounts.make(sandbox_mounts.parse(server["files"]), stage)
    restrict("/", READ_ONLY | NO_SETUID, recursive=True)
    null = os.open("/dev/null", os.O_RDWR)
    use_descriptors({0: null, 1: null, 2: 2, CONTROL_FD: control})
    os.chdir("/")
    os.execve(server["argv"][0], server["argv"], server["environment"])


class Fork:
    """The starter's end of the conversation with a fork of the fork server."""

    def __init__(self, server: socket.socket) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(server, [b"fork"], [theirs.fileno()])
            except OSError as error:
                raise NoForkServer from error
        answer = self._socket.recv(MAX_ANSWER)
        if not answer:
            raise NoForkServer
        self.pid = int(answer)

    def start(self, descriptors: dict[int, int], **request: Any) -> int:
        """Make its namespaces; returns the pid of their first process."""
        # Readable once the fork has exited, and its child is a child of the spawner.
        exited = os.pidfd_open(self.pid)
        mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        message = json.dumps({**request, "descriptors": list(descriptors)}).encode()
        socket.send_fds(self._socket, [message], [mounts, *descriptors.values()])
        pid = int(self._answer())
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        poll.poll()
        self._call(b"mount /proc")
        return pid

    def enter(self, **request: Any) -> None:
        """Let the first process become the executor."""
        self._call(json.dumps(request).encode())

    def _call(self, message: bytes) -> None:
        self._socket.send(message)
        if self._answer() != DONE:
            raise OSError("the process did not answer as expected")

    def _answer(self) -> bytes:
        answer = self._socket.recv(MAX_ANSWER)
        if not answer or answer.startswith(ERROR):
            reason = answer.removeprefix(ERROR).decode(errors="replace")
            raise OSError(reason or "the process ended during its start")
        return answer


def start(
    request: dict[str, Any], fds: dict[int, int], server: socket.socket, spawner: int
) -> None:
    """
    Start an instance, and report it to the spawner. `NoForkServer` if nothing has been done.
    """
    fork = Fork(server)
    options = sandbox_mounts.parse(request["argv"][1:])
    limit(request, fork.pid)
    prepare_mounts(request)
    descriptors = {number: fd for number, fd in fds.items() if number != INFO_FD}
    descriptors[0] = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    pid = fork.start(descriptors, uid=request["uid"])
    first = os.pidfd_open(pid)
    try:
        # At the same time: to enter control groups takes the kernel longer than all the rest.
        sandbox = Task(lambda: _make_sandbox(request, options, first))
        join_groups(request, pid)
        sandbox.wait()
        fork.enter(
            directory=options.values["--chdir"],
            uid=int(options.values["--uid"]),
            seccomp=SECCOMP_FD if SECCOMP_FD in fds else 0,
            environment=options.environment,
            ephemeral=request["ephemeral"],
            config=json.loads(options.command[-1]),
        )
        if request["ephemeral"] and os.getppid() != spawner:
            raise OSError("the spawner has ended")
    except BaseException:
        signal.pidfd_send_signal(first, signal.SIGKILL)
        raise
    os.write(fds[INFO_FD], json.dumps({MAIN: pid, CHILD: pid}).encode())


def _make_sandbox(request: dict[str, Any], options: sandbox_mounts.Options, first: int) -> None:
    """In the namespaces of the process `first`, whose root changes too."""
    become_user(request["uid"])
    check(libc.setns(first, NAMESPACES), "entering the instance's namespaces")
    socket.sethostname(options.values["--hostname"])
    sandbox_mounts.make(options, request["stage"])
