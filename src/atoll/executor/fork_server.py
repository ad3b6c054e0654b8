"""
The fork server of a machine: a warm interpreter on the host, whose forks become executors.

A fork needs a tenth of the time and memory that a new interpreter needs. The fork server never sees
what an instance is: its memory is that of every executor and of all user code. The spawner's
process that starts an instance, the starter, sends it one socket. A fork reads what it needs from
that socket, while the starter makes the sandbox. The conversation:

1. the fork sends its pid;
2. the starter sends a mount namespace and descriptors; the fork enters the namespace, becomes the
   instance's user, makes its namespaces, forks their first process, sends its pid and exits;
3. at any message, the first process mounts its /proc, and answers DONE;
4. the starter moves the first process to the instance's control groups, makes the root file system
   in its namespaces, and sends what the executor needs;
5. the first process gives up all privileges, answers DONE, and is the executor from then on.

Whatever fails is sent as ERROR with the reason.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import fcntl
import os
import struct
import sys

from ..protocol import minijson
from . import __main__ as executor
from . import privileges, syscalls
from .interpreter import zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

CONTROL_FD = 3
ERROR = b"!"
DONE = b"done"
MAX_MESSAGE = 256 * 1024
MAX_DESCRIPTORS = 16
UNUSED_FD = 100
"""Above all descriptors that an executor gets."""


def main() -> None:
    control = _socket.socket(fileno=CONTROL_FD)
    # The mark of its data directory: not for user code.
    del os.environ[sys.argv[1]]
    zygote.import_common()
    executor.prepare(hooks=False)
    # Forks that have done their part are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors = _receive(control)
        if not descriptors:
            os._exit(0)  # The spawner has exited.
        starter = _socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            _start(starter)
        starter.close()


def _start(starter: _socket.socket) -> NoReturn:
    try:
        starter.send(b"%d" % os.getpid())
        message, (mounts, *given) = _receive(starter)
        request = minijson.loads(message)
        privileges.enter_mounts(mounts)
        os.close(mounts)
        starter = _take(given, request["descriptors"], starter)
        privileges.become_user(request["uid"])
        privileges.unshare(privileges.NEW_SANDBOX)
        privileges.map_user(0, request["uid"])
        privileges.enable_loopback()
        pid = os.fork()
        if pid == 0:
            _become_executor(starter)
        starter.send(b"%d" % pid)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the process ends here
        starter.send(ERROR + str(error).encode())
    finally:
        os._exit(1)


def _become_executor(starter: _socket.socket) -> NoReturn:
    if not starter.recv(MAX_MESSAGE):
        os._exit(1)  # The starter has failed.
    privileges.mount_proc("/proc")
    starter.send(DONE)
    message = starter.recv(MAX_MESSAGE)
    if not message:
        os._exit(1)
    request = minijson.loads(message)
    os.chdir(request["directory"])
    os.setsid()
    # Not before: by now the starter has moved this process to the instance's groups.
    privileges.unshare(privileges.NEW_CGROUPS)
    privileges.unshare(privileges.NEW_USERS)
    privileges.map_user(request["uid"], 0)
    privileges.drop_capabilities()
    if request["seccomp"]:
        with open(request["seccomp"], "rb") as file:
            syscalls.install_filter(file.read())
    # Most is the fork server's own; what is not written stays shared memory.
    for name, value in request["environment"].items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if request["ephemeral"]:
        privileges.die_with_parent()
    starter.send(DONE)
    starter.close()
    try:
        executor.serve(request["config"])
    except BaseException:  # noqa: BLE001 - nothing may return into the fork server
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _take(given: list[int], numbers: list[int], starter: _socket.socket) -> _socket.socket:
    """Give the descriptors their numbers, and close all others but the starter's."""
    # First to high numbers: a number may be that of another one.
    high = [_duplicate(fd) for fd in [starter.fileno(), *given]]
    starter.close()
    for fd, number in zip(high[1:], numbers):
        os.dup2(fd, number)
    syscalls.close_descriptors_except(*numbers, high[0])
    return _socket.socket(fileno=high[0])


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, UNUSED_FD)


def _receive(socket: _socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = socket.recvmsg(
        MAX_MESSAGE, _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
    )
    descriptors: list[int] = []
    for _, kind, body in ancillary:
        if kind == _socket.SCM_RIGHTS:
            descriptors += struct.unpack("%di" % (len(body) // 4), body)
    return message, descriptors
