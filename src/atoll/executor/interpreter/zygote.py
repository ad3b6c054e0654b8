"""
The warm interpreter whose forks run user code.

It keeps a spare child forked ahead, waiting for a job, so that no request waits for a fork. It
reports the end of each child with what it used. It runs no user code itself; a template's modules
are imported here, once, and the children share their memory.

Jobs travel on a socket of their own whose reading end the spare shares; the spare that takes a job
answers on it with the job's number and its pid, and closes it before user code runs.

Zygote and spare are as closed to user code as the supervisor: not dumpable, so that no process can
read or write their memory or open their descriptors. A child becomes dumpable when it has taken a
job and has the job's descriptors alone. None of their descriptors leads to a file of the host: what
they print goes into a pipe, of which the supervisor keeps the end.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import gc
import marshal
import os
import site
import struct
import sys

from ...protocol import minijson
from .. import syscalls
from . import child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

READY = b"r"  # JSON: what could not be imported
EXITED = b"x"  # EXIT
WANT = b"w"  # from the supervisor: so many children

EXIT = struct.Struct("!iiqqqqq")  # pid, status, user µs, system µs, peak KiB, read, written
TAKEN = struct.Struct("!Qi")  # job number, pid
JOB = struct.Struct("!Q")
INLINE_JOB = 64 * 1024
COMMON = ["json"]
BLOCK = 512  # the unit in which the kernel counts what went to and from storage
MAX_MESSAGE = 128 * 1024
RETRY_MILLISECONDS = 100
"""Delay before a failed fork is repeated: user code may have used up the process limit."""
BUNDLE = sys.path[0] if sys.path else ""
INSIDE = "/run/atoll/inside/lib"
"""What of ours user code may import. Last: nothing of the template's or the user's is hidden."""
HOMES = ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
"""Variables with the places of settings and caches, which user code can write to."""


class Started:
    """A zygote as the supervisor has it."""

    __slots__ = ("control", "jobs", "output", "pid")

    def __init__(
        self, pid: int, control: _socket.socket, jobs: _socket.socket, output: int
    ) -> None:
        self.pid = pid
        self.control = control
        self.jobs = jobs
        self.output = output
        """Pipe with what the zygote prints: its own errors, and what modules print on import."""


def start(preload: list[str], hooks: bool, packages: str, oom_score: int = 0) -> Started:
    """
    Fork the zygote off the supervisor. Where both are in one control group, `oom_score` is by how
    much the kernel prefers to end what user code runs.
    """
    control, their_control = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    jobs, their_jobs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    output, their_output = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        their_control.close()
        their_jobs.close()
        os.close(their_output)
        control.setblocking(False)
        jobs.setblocking(False)
        return Started(pid, control, jobs, output)
    status = 1
    try:
        for standard in (1, 2):
            os.dup2(their_output, standard)
        _close_all_but(0, 1, 2, their_control.fileno(), their_jobs.fileno())
        # What the supervisor blocks, it blocks for itself alone.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        Zygote(their_control, their_jobs, oom_score).run(preload, hooks, packages)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here; nothing may return into the supervisor
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _close_all_but(*keep: int) -> None:
    low = -1
    for fd in [*sorted(keep), 65536]:
        if fd > low + 1:  # An empty range is not nothing to every version of closerange.
            os.closerange(low + 1, fd)
        low = fd


class Zygote:
    def __init__(self, control: _socket.socket, jobs: _socket.socket, oom_score: int) -> None:
        self._oom_score = oom_score
        self._control = control
        self._jobs = jobs
        self._children: dict[int, None] = {}
        self._used = False
        self._want = 0

    def run(self, preload: list[str], hooks: bool, packages: str) -> None:
        syscalls.set_name("zygote")
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        come_home = _leave_home() if hooks or preload else None
        if hooks:
            run_hooks()
        if packages:
            # The template's; a session's own come in front of them.
            sys.path.insert(0, packages)
        failed = _import(preload)
        if come_home is not None:
            come_home()
            child.rehearse()
            gc.freeze()
        self._private = (wake_read, wake_write, self._control.fileno())
        # No child before the supervisor says so: the driver first puts this process into the
        # control group that its children are to inherit.
        self._want = 0
        self._control.send(READY + minijson.dumps(failed))
        import select

        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            complete = len(self._children) >= self._want
            events = poll.poll(None if complete else RETRY_MILLISECONDS)
            if not events:
                self._fill()
            for fd, _ in events:
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                else:
                    message = self._control.recv(MAX_MESSAGE)
                    if not message:
                        return
                    self._want = int(message[1:])
                    self._fill()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait3(os.WNOHANG)
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
                        usage.ru_inblock * BLOCK,
                        usage.ru_oublock * BLOCK,
                    )
                )
        self._fill()
        if not self._used:
            self._settle_in()

    def _settle_in(self) -> None:
        """
        The session is in use: import what its code is likely to, once for all later executions.
        Instances that wait for a first one do without, and are smaller.
        """
        self._used = True
        _import(COMMON)
        gc.freeze()

    def _fill(self) -> None:
        while len(self._children) < self._want:
            try:
                pid = os.fork()
            except OSError:
                return  # The process limit is reached: `run` tries again.
            if pid == 0:
                self._become_child()
            self._children[pid] = None

    def _become_child(self) -> None:
        """Never returns."""
        try:
            # The C module: every page that a child touches first is a copy that it waits for, and
            # the one in Python makes enums of what it is given.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Who started the instance may ignore these for its own sake; code hears of them.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            for fd in self._private:
                os.close(fd)
            os.setsid()
            syscalls.set_subreaper()
            if self._used:
                # Touches the pages that the run will touch: their copies are made while nobody
                # waits. Instances that were never used stay smaller instead.
                child.rehearse()
            child.wait_and_run(self._jobs, receive_job, self._oom_score)
        finally:
            os._exit(70)


def set_up_paths(hooks: bool) -> None:
    """
    Where user code finds packages, as without -I -S; our own bundle leaves.

    The start-up code that packages bring (lines of .pth files, sitecustomize) is not run here: with
    this machine's interpreter it was meant for this machine. For an interpreter of the template's
    own `run_hooks` finds the packages too, which for a virtual environment are not these.
    """
    sys.path[:] = [entry for entry in sys.path if entry != BUNDLE]
    if not hooks:
        for directory in site.getsitepackages():
            _add_site(directory)
    sys.path.append(INSIDE)
    site.setquit()
    site.setcopyright()
    site.sethelper()


def run_hooks() -> None:
    """That start-up code, for an interpreter that is the template's own."""
    site.main()


def _leave_home() -> Callable[[], None]:
    """
    Go to / and have a new directory as home, until the function that is returned is called. Modules
    read settings and caches when they are imported, and take some of them for code; what lies in
    the workspace and in /tmp is user code's, and none of it may run here.
    """
    theirs = {name: os.environ[name] for name in HOMES if name in os.environ}
    place = "/tmp/.zygote-%s" % os.urandom(8).hex()  # noqa: S108 - private to the instance
    try:
        os.mkdir(place, 0o700)
    except OSError:
        pass  # User code has used up /tmp: then there is no home.
    os.environ.update(dict.fromkeys(theirs, place))
    os.chdir("/")

    def come_home() -> None:
        os.environ.update(theirs)
        try:
            os.rmdir(place)
        except OSError:
            pass  # Modules have put something there, and may look for it.

    return come_home


def _add_site(directory: str) -> None:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    sys.path.append(directory)
    for name in names:
        if not name.endswith(".pth"):
            continue
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, ValueError):
            continue
        for line in lines:
            path = os.path.join(directory, line.strip())
            code = line.startswith(("import ", "import\t", "#"))
            if line.strip() and not code and os.path.exists(path):
                sys.path.append(path)


def _import(names: list[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - the module is the user's; it may raise anything
            failed[name] = "%s: %s" % (type(error).__name__, error)
    return failed


def warm(hooks: bool) -> None:
    """
    In the supervisor, before the fork: do once what every child would otherwise do and pay for, and
    what supervisor, zygote and children can then share. Pages that each of them touches are copied.
    """
    set_up_paths(hooks)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    child.rehearse()
    gc.collect()
    gc.freeze()


def receive_job(jobs: _socket.socket) -> tuple[int, dict[str, Any], list[int]]:
    """Wait for a job: its number, its description and the descriptors that came with it."""
    return receive(jobs, lambda number: jobs.send(TAKEN.pack(number, os.getpid())))


def receive(
    jobs: _socket.socket, taken: Callable[[int], object] = lambda number: None
) -> tuple[int, dict[str, Any], list[int]]:
    """The same without a word to the supervisor, but for what `taken` says."""
    data, ancillary, _, _ = jobs.recvmsg(
        # Kept from the programs that a run starts, unless it is made one of their three.
        MAX_MESSAGE,
        _socket.CMSG_SPACE(8 * 4),
        _socket.MSG_CMSG_CLOEXEC,
    )
    descriptors: list[int] = []
    for level, kind, body in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            descriptors += struct.unpack("%di" % (len(body) // 4), body[: len(body) // 4 * 4])
    if not data:
        os._exit(0)  # The supervisor is gone, and the namespace with it.
    (number,) = JOB.unpack_from(data)
    body = data[JOB.size :]
    taken(number)
    if not body:
        # Too large for a message: it is in the last descriptor.
        with open(descriptors.pop(), "rb") as file:
            file.seek(0)
            body = file.read()
    return number, marshal.loads(body), descriptors  # noqa: S302 - written by our own supervisor


def taken_jobs(jobs: _socket.socket) -> list[tuple[int, int]]:
    """Which spare took which job since this was last asked: numbers and pids."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            message = jobs.recv(TAKEN.size)
        except OSError:
            return found
        if not message:
            return found
        if len(message) == TAKEN.size:  # All that is said there by who runs our code alone.
            found.append(TAKEN.unpack(message))


def recall_jobs(jobs: _socket.socket) -> list[tuple[int, int]]:
    """
    From now on a spare that takes a job cannot say so, and ends; what was taken and not yet told.
    """
    jobs.shutdown(_socket.SHUT_RD)
    return taken_jobs(jobs)


def send_job(
    jobs: _socket.socket, number: int, job: dict[str, Any], descriptors: list[int]
) -> None:
    """Hand a job to the next spare. Raises BlockingIOError when too many are waiting already."""
    # Not JSON: parsing it would touch more of the child's memory than the rest of the hand-over.
    body = marshal.dumps(job)
    spill = -1
    if len(body) > INLINE_JOB:
        spill = os.memfd_create("job", os.MFD_CLOEXEC)
        view = memoryview(body)
        while view:
            view = view[os.write(spill, view) :]
        body = b""
    fds = descriptors if spill < 0 else [*descriptors, spill]
    try:
        jobs.sendmsg(
            [JOB.pack(number), body],
            [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("%di" % len(fds), *fds))],
        )
    finally:
        if spill >= 0:
            os.close(spill)
