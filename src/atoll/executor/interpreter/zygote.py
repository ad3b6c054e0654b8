"""
The zygote: a warm Python interpreter whose forks run user code.

It keeps spare children forked ahead, so that no request waits for a fork, and reports the exit and
the resource usage of each child. It runs no user code itself. It imports the template's modules
once; the children share their memory.

Spare children share the reading end of the job socket. The child that takes a job announces it
there (see `jobs`) and closes the socket before user code runs.

Zygote and spare children are as closed to user code as the supervisor: they are not dumpable, so no
process can access their memory or descriptors. A child becomes dumpable once it has taken a job and
holds only the job's descriptors. None of these leads to a file of the host: what zygote and spare
children print goes into a pipe to the supervisor.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import gc
import os
import select
import struct
import sys
from _signal import SIG_SETMASK
from _signal import pthread_sigmask as set_signal_mask
from os import WNOHANG, close, fork, sched_yield, setsid, wait3

from ...protocol import minijson
from .. import syscalls
from ..syscalls import set_subreaper
from . import child, search_paths

READY = b"r"  # JSON: modules that could not be imported, and why
EXITED = b"x"  # EXIT
WANTED = b"w"  # from the supervisor: how many children there should be

EXIT = struct.Struct("!iiqqqqq")  # pid, status, user µs, system µs, peak KiB, read, written
COMMON = ["json"]
"""Modules that most code imports."""
STORAGE_BLOCK = 512
"""Unit in which the kernel counts reads and writes of storage."""
MAX_MESSAGE = 128 * 1024
BLOCKED = (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RETRY_MILLISECONDS = 100
"""Delay before a failed fork is repeated: user code may have reached the process limit."""


def start(
    preload: list[str], hooks: bool, packages: str, oom_score: int = 0
) -> tuple[int, _socket.socket, _socket.socket, int]:
    """
    Fork the zygote off the supervisor. Returns its pid, the supervisor's ends of its control socket
    and of the socket for jobs, and a pipe with its errors and what modules print on import.

    `oom_score` makes the kernel prefer processes of user code
    when memory runs out; it matters where all of them share one control group.
    """
    control, their_control = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    job_socket, their_jobs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    output, their_output = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        their_control.close()
        their_jobs.close()
        os.close(their_output)
        control.setblocking(False)
        job_socket.setblocking(False)
        return pid, control, job_socket, output
    status = 1
    try:
        for standard in (1, 2):
            os.dup2(their_output, standard)
        syscalls.close_descriptors_except(0, 1, 2, their_control.fileno(), their_jobs.fileno())
        # The supervisor blocks signals only for itself.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        Zygote(their_control, their_jobs, oom_score).run(preload, hooks, packages)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here; nothing may return into the supervisor
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


class Zygote:
    def __init__(self, control: _socket.socket, job_socket: _socket.socket, oom_score: int) -> None:
        self._oom_score = oom_score
        self._control = control
        self._job_socket = job_socket
        self._children: dict[int, None] = {}
        self._used = False
        self._jobs = select.poll()
        self._jobs.register(job_socket.fileno(), select.POLLIN)
        self._wanted = 0

    def run(self, preload: list[str], hooks: bool, packages: str) -> None:
        syscalls.set_name("zygote")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        restore_home = search_paths.leave_home() if hooks or preload else None
        if hooks:
            search_paths.run_hooks()
        if packages:
            # Packages of the template; those of a session come in front of them.
            sys.path.insert(0, packages)
        failed = _import(preload)
        if restore_home is not None:
            restore_home()
            child.rehearse()
            gc.freeze()
        os.umask(0o022)
        # The process that started the instance may ignore these; user code must not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        exits = syscalls.signal_descriptor(signal.SIGCHLD)
        self._private = (exits, self._control.fileno())
        # No child until the supervisor asks for one: the driver first moves this process into the
        # control group that its children inherit.
        self._wanted = 0
        self._control.send(READY + minijson.dumps(failed))
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(exits, select.POLLIN)
        while True:
            complete = len(self._children) >= self._wanted
            events = poll.poll(None if complete else RETRY_MILLISECONDS)
            if not events:
                self._fill()
            for fd, _ in events:
                if fd == exits:
                    os.read(exits, 4096)
                    self._reap()
                else:
                    message = self._control.recv(MAX_MESSAGE)
                    if not message:
                        return
                    self._wanted = int(message[1:])
                    self._fill()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = wait3(WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if self._children.pop(pid, 0) is None:
                self._control.send(
                    EXITED
                    + EXIT.pack(
                        pid,
                        status,
                        int(usage.ru_utime * 1e6),
                        int(usage.ru_stime * 1e6),
                        usage.ru_maxrss,
                        usage.ru_inblock * STORAGE_BLOCK,
                        usage.ru_oublock * STORAGE_BLOCK,
                    )
                )
        # The supervisor goes first: a client waits for the result, and not for the next child.
        sched_yield()
        self._fill()
        if not self._used:
            self._import_common()

    def _import_common(self) -> None:
        """
        Import modules that code is likely to use, once for all later runs. Only after the first
        run: instances in a warm pool stay smaller.
        """
        self._used = True
        _import(COMMON)
        gc.freeze()

    def _fill(self) -> None:
        while len(self._children) < self._wanted:
            try:
                pid = fork()
            except OSError:
                return  # The process limit is reached; `run` retries.
            if pid == 0:
                self._become_child()
            self._children[pid] = None

    def _become_child(self) -> None:
        """Never returns."""
        try:
            # With few calls, and of names of this module: see `child`.
            set_signal_mask(SIG_SETMASK, ())
            for fd in self._private:
                close(fd)
            setsid()
            set_subreaper()
            if self._used and not self._jobs.poll(0):
                # Touches the pages that the run will touch, so that they are copied before a
                # run waits for it. Instances that were never used stay smaller instead.
                child.rehearse()
            child.wait_and_run(self._job_socket, self._oom_score)
        finally:
            os._exit(70)


def _import(names: list[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - the module is the user's; it may raise anything
            failed[name] = "%s: %s" % (type(error).__name__, error)
    return failed


def import_common() -> None:
    """Import the modules that most code imports, before instances are forked."""
    _import(COMMON)


def warm(hooks: bool) -> None:
    """
    Prepare the interpreter in the supervisor, before it forks: supervisor, zygote and children then
    share these pages, and no child repeats the work.
    """
    search_paths.set_up(hooks)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    child.rehearse()
    gc.collect()
    gc.freeze()
